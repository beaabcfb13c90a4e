//! The files that commands write: `-`, links, modes and pipes.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::process::Command;

use serde_json::Value;

use super::workplace::Workplace;
use crate::common::command::{Output, assay, assert_refused, command};

#[test]
fn json_dash_is_all_of_stdout_and_the_text_goes_to_stderr() {
    for dash in ["-", "/dev/stdout"] {
        let output = assay(&["spec", "--preset", "trl", "--json", dash]);
        assert_eq!(output.code, 0, "{}", output.stderr);
        let value: Value = serde_json::from_str(&output.stdout).expect("JSON and nothing else");
        assert_eq!(value["command"], format!("assay spec --preset trl --json {dash}"));
        assert!(output.stderr.contains("epsilon_low"), "{}", output.stderr);
        let quiet = assay(&["spec", "--preset", "trl", "--json", dash, "-q"]);
        assert_eq!((quiet.code, quiet.stderr.as_str()), (0, ""));
    }
}

#[test]
fn output_dash_writes_the_bytes_that_a_file_gets() {
    let workplace = Workplace::new();
    let file = workplace.path("problem.safetensors");
    let args = |output| ["generate", "--shape", "2x3x65", "--seed", "5", "-o", output];
    assert_eq!(assay(&args(&file)).code, 0);
    let piped = command().args(args("-")).output().unwrap();
    assert!(piped.status.success());
    assert_eq!(piped.stdout, fs::read(&file).unwrap());
    assert!(String::from_utf8(piped.stderr).unwrap().contains("2x3x65 bf16"));
}

#[test]
fn output_dash_for_a_page_or_a_folder_or_twice() {
    let workplace = Workplace::new();
    let json = workplace.path("spec.json");
    fs::write(&json, br#"{"command": "assay replay", "pass": true, "checks": []}"#).unwrap();
    let page = assay(&["report", &json, "-o", "-"]);
    assert!(page.code == 0 && page.stdout.starts_with("<!DOCTYPE html>"), "{}", page.stderr);
    assert_refused(&["suite", "--cases", "2", "-o", "-"], &["-o: got stdout, expected a folder"]);
    let twice = ["generate", "--shape", "1x2x3", "-o", "-", "--json", "-"];
    assert_refused(&twice, &["--json and -o: got stdout twice"]);
}

#[test]
fn output_over_a_file_keeps_its_mode_and_its_links() {
    let workplace = Workplace::new();
    let [file, link, dangling, new] =
        ["result.json", "link.json", "dangling.json", "new.json"].map(|name| workplace.path(name));
    fs::write(&file, "before").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
    symlink("result.json", &link).unwrap();
    symlink("new.json", &dangling).unwrap();
    for path in [&link, &dangling] {
        let output: Output = assay(&["spec", "--preset", "trl", "-q", "--json", path]);
        assert_eq!(output.code, 0, "{}", output.stderr);
        assert!(fs::symlink_metadata(path).unwrap().is_symlink(), "{path}");
    }
    for path in [&file, &new] {
        let _: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    }
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o7777, 0o640);
    // Nothing else is left in the folder, which has a problem and a candidate too.
    assert_eq!(fs::read_dir(workplace.path("")).unwrap().count(), 6);
}

#[test]
fn output_to_a_fifo_is_written_into_it() {
    let workplace = Workplace::new();
    let fifo = workplace.path("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    // Open at both ends, it waits for nobody, and its buffer holds the result.
    let mut reader = File::options().read(true).write(true).open(&fifo).unwrap();
    assert_eq!(assay(&["spec", "--preset", "trl", "-q", "--json", &fifo]).code, 0);
    assert!(fs::symlink_metadata(&fifo).unwrap().file_type().is_fifo(), "the pipe became a file");
    let mut bytes = vec![0; 1 << 16];
    let count = reader.read(&mut bytes).unwrap();
    let value: Value = serde_json::from_slice(&bytes[..count]).unwrap();
    assert_eq!(value["command"], format!("assay spec --preset trl -q --json {fifo}"));
}
