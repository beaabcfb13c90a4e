//! `assay emit`: the files agree with each other and with what was asked, and a refused command leaves none.
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::command::{assay, assert_refused};
use assay::spec::LossSpec;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tempfile::TempDir;

const SPEC: &str = "objective: {ppo_clip: {epsilon_low: 0.1, epsilon_high: 0.3, dual_clip: 3.0}}
kl: {beta: 0.04, estimator: k3}
temperature: 0.8
entropy_coef: 0.02
reduction: {fixed_length: {rows: all, length: 64}}
";

/// A folder that something was emitted into, beside its spec.
struct Emitted {
    folder: TempDir,
    manifest: Value,
}

impl Emitted {
    fn new(implementation: &str, shape: &str, dtype: &str) -> Self {
        let folder = TempDir::new().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
        fs::write(path("spec.yaml"), SPEC).unwrap();
        let (spec, out, json) = (path("spec.yaml"), path("out"), path("emit.json"));
        let asked = ["--impl", implementation, "--shape", shape, "--dtype", dtype, "--target", "v6e:2x2"];
        let output = assay(&[&["emit", "--spec", &spec, "-o", &out, "--json", &json], &asked[..]].concat());
        assert_eq!(output.code, 0, "{}", output.stderr);
        let read = |path| serde_json::from_str::<Value>(&fs::read_to_string(path).unwrap()).unwrap();
        let manifest = read(path("out/manifest.json"));
        let held: Vec<String> = manifest["shape"].as_array().unwrap().iter().map(Value::to_string).collect();
        let held = format!("{} {dtype} on each of 4 devices, v6e:2x2", held.join("x"));
        assert!(output.stdout.contains(&held), "{held}: {}", output.stdout);
        let mut result = read(json);
        let command = result.as_object_mut().unwrap().remove("command").unwrap();
        assert!(command.as_str().unwrap().starts_with("assay emit --spec "), "{command}");
        assert_eq!(manifest, result, "--json is the manifest, and the command");
        Self { folder, manifest }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("out").join(name)
    }

    fn text(&self, name: &Value) -> String {
        fs::read_to_string(self.path(name.as_str().unwrap())).unwrap()
    }

    fn kernels(&self) -> &Vec<Value> {
        self.manifest["kernels"].as_array().unwrap()
    }
}

/// `tensor<1x2xf32>` of each array of a list.
fn types(arrays: &Value) -> Vec<String> {
    let one = |array: &Value| {
        let extents = array["shape"].as_array().unwrap().iter().map(|extent| format!("{extent}x"));
        let dtype = array["dtype"].as_str().unwrap().replace("pred", "i1");
        format!("tensor<{}{dtype}>", extents.collect::<String>())
    };
    arrays.as_array().unwrap().iter().map(one).collect()
}

/// The types of a list of parameters or outputs, whatever their names and attributes.
fn tensors(text: &str) -> Vec<String> {
    let end = |rest: &str| rest.find('>').expect("a type ends");
    text.split("tensor<").skip(1).map(|rest| format!("tensor<{}>", &rest[..end(rest)])).collect()
}

fn names(arrays: &Value) -> Vec<&str> {
    arrays.as_array().unwrap().iter().map(|array| array["name"].as_str().unwrap()).collect()
}

/// Both implementations, whole and cut over four devices, in the two dtypes that are stored in different ways.
fn every() -> impl Iterator<Item = Emitted> {
    let whole = ["tile-one-pass", "tile-two-pass"];
    let cut = ["tile-one-pass-rows", "tile-two-pass-rows", "tile-two-pass-vocab", "tile-two-pass-mesh"];
    let asked = whole.into_iter().chain(cut).flat_map(|id| ["bf16", "f16"].map(|dtype| (id, dtype)));
    asked.map(|(id, dtype)| Emitted::new(id, "4x5x1031", dtype))
}

/// Four devices have 258 columns each, the last one 257: registers would hold more than one in 64 that are none.
#[test]
fn emit_describes_a_cut_vocabulary_as_each_device_holds_it() {
    for (id, shape, columns) in [
        ("tile-two-pass", [4, 5, 1031], [1031, 1031]),
        ("tile-two-pass-vocab", [4, 5, 258], [257, 258]),
        ("tile-two-pass-mesh", [2, 5, 516], [515, 516]),
    ] {
        let emitted = Emitted::new(id, "4x5x1031", "bf16");
        assert_eq!(emitted.manifest["shape"], json!(shape), "{id}");
        assert_eq!(emitted.kernels().len(), 2);
        for kernel in emitted.kernels() {
            assert_eq!(kernel["columns"], json!(columns), "{id}");
            assert!(names(&kernel["operands"]).contains(&"columns"), "{id}");
        }
        // The batch of all devices: four sequences where each holds them, sixteen where each holds its own.
        let sequences = if id == "tile-two-pass" { 16.0 } else { 4.0 };
        assert_eq!(emitted.manifest["numbers"]["denominator"].as_f64(), Some(64.0 * sequences), "{id}");
    }
}

#[test]
fn emit_manifest_names_every_file_and_no_other() {
    for emitted in every() {
        let named = emitted.kernels().iter().flat_map(|kernel| [&kernel["payload"], &kernel["text"]]);
        let named = named.chain([&emitted.manifest["module"]["file"]]).map(|name| name.as_str().unwrap().to_string());
        let named: BTreeSet<String> = named.chain(["manifest.json".to_string()]).collect();
        let there = fs::read_dir(emitted.path("")).unwrap();
        let there: BTreeSet<String> = there.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        assert_eq!(named, there);
    }
}

#[test]
fn emit_manifest_says_what_was_asked_and_its_spec_reads_back() {
    let emitted = Emitted::new("tile-two-pass", "2x5x1031", "f16");
    let manifest = &emitted.manifest;
    for (field, value) in [
        ("assay", json!(env!("CARGO_PKG_VERSION"))),
        ("impl", json!("tile-two-pass")),
        ("target", json!("v6e:2x2")),
        ("devices", json!(4)),
        ("shape", json!([2, 5, 1031])),
        ("dtype", json!("f16")),
    ] {
        assert_eq!(manifest[field], value, "{field}");
    }
    let spec: LossSpec = serde_json::from_value(manifest["spec"].clone()).unwrap();
    assert_eq!(spec, serde_saphyr::from_str::<LossSpec>(SPEC).unwrap());
    let pinned = format!("libtpu=={} ", manifest["libtpu"].as_str().unwrap());
    assert!(fs::read_to_string("setup/tpu.txt").unwrap().contains(&pinned), "tried with what is installed");
}

#[test]
fn emit_numbers_are_those_of_the_spec() {
    let numbers = &Emitted::new("tile-one-pass", "2x5x1031", "bf16").manifest["numbers"];
    let expected = [
        ("low", 0.9_f32),
        ("high", 1.3),
        ("dual_clip", 3.0),
        ("beta", 0.04),
        ("inverse_temperature", 1.25),
        ("entropy_coef", 0.02),
        // Two sequences on each of four devices, 64 tokens each.
        ("denominator", 512.0),
        ("loss_scale", 1.0),
    ];
    for (name, value) in expected {
        assert_eq!(numbers[name].as_f64().unwrap() as f32, value, "{name}");
    }
    assert_eq!(numbers["delta"], json!("inf"), "JSON has no infinity");
    assert_eq!(numbers.as_object().unwrap().len(), expected.len() + 1);
}

#[test]
fn emit_payloads_hold_the_text_of_their_kernels() {
    for emitted in every() {
        for kernel in emitted.kernels() {
            let text = emitted.text(&kernel["text"]);
            let payload: Value = serde_json::from_str(&emitted.text(&kernel["payload"])).unwrap();
            let body = payload["custom_call_config"]["body"].as_str().unwrap();
            assert_eq!(String::from_utf8(STANDARD.decode(body).unwrap()).unwrap(), text);
            assert!(text.contains(&format!("sym_name = {}", kernel["name"])));
            let version = format!("stable_mosaic.version = {} : i64", emitted.manifest["mosaic_version"]);
            assert!(text.contains(&version), "{version}");
            let limit = &payload["scoped_memory_configs"][0]["size"];
            assert!(kernel["vmem_bytes"].as_u64() <= limit.as_u64(), "{} of {limit}", kernel["vmem_bytes"]);
        }
    }
}

#[test]
fn emit_lists_kernels_as_the_module_calls_them() {
    for emitted in every() {
        let module = emitted.text(&emitted.manifest["module"]["file"]);
        let calls: Vec<&str> = module.lines().filter(|line| line.contains("@tpu_custom_call")).collect();
        assert_eq!(calls.len(), emitted.kernels().len());
        for (call, kernel) in calls.into_iter().zip(emitted.kernels()) {
            let (given, returned) = call.rsplit_once("} : (").unwrap().1.split_once(") -> (").unwrap();
            assert_eq!(types(&kernel["operands"]), tensors(given));
            assert_eq!(types(&kernel["results"]), tensors(returned));
            let payload = emitted.text(&kernel["payload"]).replace('\\', "\\5C").replace('"', "\\22");
            assert!(call.contains(&format!("backend_config = \"{payload}\"")), "{}", kernel["name"]);

            let alias = |alias: &Value| format!("operand_index = {},", alias["operand"]);
            let aliases = kernel["aliases"].as_array().unwrap();
            assert_eq!(call.matches("operand_index = ").count(), aliases.len());
            assert!(aliases.iter().map(alias).all(|alias| call.contains(&alias)));
            for array in ["operands", "results"].into_iter().flat_map(|key| kernel[key].as_array().unwrap()) {
                let rank = array["shape"].as_array().unwrap().len();
                assert_eq!(array["layout"], json!((0..rank).collect::<Vec<_>>()));
                let bits = array["name"].as_str().unwrap().ends_with("logits") && emitted.manifest["dtype"] == "f16";
                assert_eq!((&array["dtype"] == "i16", array["bits_of"] == "f16"), (bits, bits), "{array}");
            }
        }
    }
}

#[test]
fn emit_module_takes_and_returns_what_the_manifest_says() {
    for emitted in every() {
        let module = &emitted.manifest["module"];
        let text = emitted.text(&module["file"]);
        let (given, returned) = text.split_once("@main(").unwrap().1.split_once(") -> (").unwrap();
        let returned = returned.split_once(") {\n").unwrap().0;
        assert_eq!((types(&module["inputs"]), types(&module["outputs"])), (tensors(given), tensors(returned)));
        let inputs = ["logits", "ids", "mask", "advantages", "old_logp", "ref_logp", "numbers"];
        let of_columns =
            ["-vocab", "-mesh"].iter().any(|cut| emitted.manifest["impl"].as_str().unwrap().ends_with(cut));
        let inputs = inputs.into_iter().chain(of_columns.then_some("first_column"));
        assert_eq!(names(&module["inputs"]), inputs.collect::<Vec<_>>());
        assert_eq!(names(&module["outputs"]), ["dlogits", "logp", "entropy", "token_loss", "scalars"]);
        let numbers: Vec<&str> = emitted.manifest["numbers"].as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(module["inputs"][6]["columns"], json!(numbers));
        assert_eq!(module["aliases"], json!([{"operand": 0, "result": 0}]));
        assert!(given.split_once(',').unwrap().0.contains("tf.aliasing_output = 0"), "{given}");
    }
}

#[test]
fn emit_bad_usage_is_refused_and_leaves_nothing() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("out");
    let out = out.to_str().unwrap();
    let good =
        [("--impl", "tile-one-pass"), ("--shape", "1x8x256"), ("--dtype", "bf16"), ("--target", "v6e"), ("-o", out)];
    let with = |option: &str, value: &str| -> Vec<String> {
        let options = good.iter().map(|&(name, good)| [name, if name == option { value } else { good }]);
        ["emit"].into_iter().chain(options.flatten()).map(String::from).collect()
    };
    let lost = format!("{out}/deeper/still");
    let one_line: [(&str, &str, &[&str]); 7] = [
        ("--impl", "fastest", &["implementation", "got `fastest`", "tile-one-pass, "]),
        ("--impl", "xla", &["implementation", "got `xla`", "has kernels", "tile-one-pass, tile-two-pass"]),
        ("--impl", "tile-one-pass-vocab", &["implementation", "got `tile-one-pass-vocab`", "tile-two-pass-vocab"]),
        ("--dtype", "f64", &["logits dtype f64", "f32, bf16 and f16"]),
        ("--shape", "4294967296x1x8", &["tokens a device", "up to", "tile-two-pass takes any"]),
        ("--shape", "1x8x9999999", &["vocabulary", "tile-two-pass takes any"]),
        ("-o", &lost, &[&lost, "cannot write"]),
    ];
    for (option, value, parts) in one_line {
        let args = with(option, value);
        assert_refused(&args.iter().map(String::as_str).collect::<Vec<_>>(), parts);
    }
    for (option, value, part) in [("--shape", "1x8x0", "integers ≥ 1"), ("--target", "v4", "v5e, v5p, v6e, v7x")] {
        let args = with(option, value);
        let output = assay(&args.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(output.code, 2, "{}", output.stderr);
        assert!(output.stderr.contains(part) && output.stderr.contains(value), "{}", output.stderr);
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "something was left");
}

#[test]
fn emit_leaves_files_that_exist() {
    let folder = TempDir::new().unwrap();
    let (kept, link) = (folder.path().join("kept"), folder.path().join("link"));
    fs::create_dir(&kept).unwrap();
    std::os::unix::fs::symlink("nowhere", &link).unwrap();
    for path in [&kept, &link] {
        let path = path.to_str().unwrap();
        assert_refused(&["emit", "--shape", "1x8x256", "--target", "v6e", "-o", path], &[path, "it exists"]);
    }
    assert_eq!((fs::read_dir(&kept).unwrap().count(), fs::read_link(&link).unwrap()), (0, Path::new("nowhere").into()));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "something was left");
}

/// PTX for a GPU: the text's own entry, launch and parameters are those of the manifest, and the program calls it so.
#[test]
fn emit_gpu_kernels_are_launched_as_their_text_says() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("out");
    let asked = ["emit", "--target", "h100", "--shape", "2x8x1000", "-q", "-o", out.to_str().unwrap()];
    let output = assay(&asked);
    assert_eq!(output.code, 0, "{}", output.stderr);
    let read = |name: &str| fs::read_to_string(out.join(name)).unwrap();
    let manifest: Value = serde_json::from_str(&read("manifest.json")).unwrap();
    let module = read(manifest["module"]["file"].as_str().unwrap());
    let kernels = manifest["kernels"].as_array().unwrap();
    assert_eq!(
        (kernels.len(), &manifest["architecture"], &manifest["shape"]),
        (1, &json!("sm_90"), &json!([2, 8, 1000]))
    );
    for kernel in kernels {
        let text = read(kernel["ptx"].as_str().unwrap());
        let number = |path: &str| kernel.pointer(path).and_then(Value::as_u64).unwrap();
        let (threads, cluster) = (number("/block/0"), number("/cluster"));
        assert!(text.contains(&format!(".visible .entry {}(", kernel["name"].as_str().unwrap())));
        assert!(text.contains(&format!(".reqntid {threads}, 1, 1")) && text.contains(".target sm_90"));
        assert!(cluster == 1 || text.contains(&format!(".explicitcluster\n.reqnctapercluster {cluster}, 1, 1")));
        assert_eq!(number("/grid/0"), 16 * cluster, "a cluster a row");
        let arguments = kernel["arguments"].as_array().unwrap();
        let parameters: Vec<&str> = text.lines().filter(|line| line.contains(".param .u64")).collect();
        assert_eq!(arguments.len(), parameters.len());
        for (argument, parameter) in arguments.iter().zip(parameters) {
            // Rows of 2000 bytes are copied by 16, as is what is given of a token; ids and numbers are read one by one.
            let name = argument["name"].as_str().unwrap();
            let alignment = if ["ids", "numbers"].contains(&name) { 4 } else { 16 };
            assert_eq!(argument["alignment"], alignment, "{argument}");
            assert!(parameter.contains(&format!(".align {alignment} ")), "{argument}: {parameter}");
            assert!(parameter.trim_end_matches(',').ends_with(argument["name"].as_str().unwrap()), "{parameter}");
        }
        let over = arguments.iter().find(|argument| argument["over"].is_u64()).expect("dlogits lie over the logits");
        let under = &arguments[over["over"].as_u64().unwrap() as usize];
        assert_eq!((&over["shape"], &under["role"]), (&under["shape"], &json!("input")));
        for (name, extent) in
            [("grid_x", number("/grid/0")), ("block_x", threads), ("shared_mem_bytes", number("/shared_bytes"))]
        {
            assert!(module.contains(&format!("{name} = {extent} : i32")), "{name}");
        }
    }
    for (option, value, part) in [
        ("--target", "a100", "sm_90 and up"),
        ("--impl", "xla", "gpu-one-pass"),
        ("--shape", "1x8x1000000", "up to"),
        ("--target", "h100:9", "h100:8"),
    ] {
        let good = [("--target", "h100"), ("--shape", "2x8x1000"), ("--impl", "gpu-one-pass")];
        let refused = folder.path().join("refused");
        let mut asked = vec!["emit", "-o", refused.to_str().unwrap(), option, value];
        asked.extend(good.iter().filter(|(name, _)| *name != option).flat_map(|&(name, value)| [name, value]));
        let output = assay(&asked);
        assert!(output.code == 2 && output.stderr.contains(part) && !refused.exists(), "{value}: {}", output.stderr);
    }
}
