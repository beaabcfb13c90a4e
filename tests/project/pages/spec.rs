//! The page of the spec's fields, from the schema, the table of support, the presets and the recorded runs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;

use assay::fixture::PeerFile;
use assay::implementation::{Implementation, Workload};
use assay::judge::variants::variants;
use assay::problem::{Dtype, HeadShape, Shape};
use assay::registry::{head_registry, registry};
use assay::spec::LossSpec;
use assay::spec::presets::{self, BatchInputs, Preset, PresetOptions};
use serde_json::Value;

use super::schema::{SpecSchema, fields, has_type, type_of};
use super::{WRITTEN, hold, wrapped};

const FILE: &str = "docs/spec-reference.md";

/// The width of a line of the page.
const WIDTH: usize = 140;

/// Eight sequences of eight tokens, which eight devices can cut.
const SHAPE: Shape = Shape { batch: 8, tokens: 8, vocab: 151_936 };
const HEAD_SHAPE: HeadShape = HeadShape { batch: 8, tokens: 8, hidden: 896, vocab: 151_936 };

#[test]
fn pages_spec_reference_is_current() {
    hold(FILE, &SpecPage::new().write());
}

/// The lines of [`LossSpec::describe`] that each field changes.
const LINES: [(&str, &[&str]); 21] = [
    ("objective", &["policy"]),
    ("ratio", &["ratio"]),
    ("advantages", &["policy"]),
    ("old_logp", &["ratio"]),
    ("logits", &["logp"]),
    ("support", &["logp"]),
    ("temperature", &["logp"]),
    ("temperature_divides", &["logp"]),
    ("rollout", &["weight"]),
    ("rejection", &["rejection"]),
    ("token_weights", &["weight"]),
    ("off_policy_mask", &["mask"]),
    ("top_entropy", &["mask"]),
    ("kl", &["KL"]),
    ("entropy_coef", &["entropy"]),
    ("entropy_averaging", &["entropy"]),
    ("dentropy", &["entropy"]),
    ("ids_per_token", &["others"]),
    ("reduction", &["reduction"]),
    ("denominator_epsilon", &["reduction"]),
    ("scale", &["loss"]),
];

/// A spec and the settings that it has, each as `key`, or `key: choice`.
struct KnownSpec {
    spec: LossSpec,
    value: Value,
    settings: BTreeSet<String>,
}

struct SpecPage {
    schema: SpecSchema,
    /// The named choices of the table of support, each with the implementations that refuse it, by id.
    variants: Vec<(KnownSpec, BTreeSet<String>)>,
    /// The projects that have each setting, in their defaults or in a recorded run.
    projects: BTreeMap<String, BTreeSet<Preset>>,
    implementations: Vec<String>,
    /// The examples that the section has already.
    shown: BTreeSet<String>,
    text: String,
}

impl SpecPage {
    fn new() -> Self {
        let schema = SpecSchema::new();
        let (all, heads) = (registry(None), head_registry(None));
        let known = variants().into_iter().map(|variant| {
            let mut refused = refusals(&all, SHAPE, &variant.spec);
            refused.extend(refusals(&heads, HEAD_SHAPE, &variant.spec));
            (KnownSpec::new(&schema, variant.spec), refused)
        });
        let mut page = Self {
            variants: known.collect(),
            projects: BTreeMap::new(),
            implementations: ids(&all).chain(ids(&heads)).collect(),
            shown: BTreeSet::new(),
            schema,
            text: String::new(),
        };
        page.note_projects();
        page
    }

    /// Notes the settings of each project's functions with their defaults, and of all recorded runs.
    fn note_projects(&mut self) {
        let defaults = Preset::ALL.into_iter().flat_map(|preset| {
            let of = move |function| {
                presets::spec(preset, Some(function), &PresetOptions::default(), &BatchInputs::default()).ok()
            };
            preset.functions().iter().filter_map(move |&function| Some((preset, of(function)?.spec)))
        });
        let mut files: Vec<_> = fs::read_dir("fixtures/peers").unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        let recorded =
            files.iter().filter(|path| path.extension().is_some_and(|extension| extension == "json")).map(|path| {
                let run = PeerFile::read(path).unwrap();
                (run.peer.parse().unwrap(), run.resolve().unwrap().spec)
            });
        for (project, spec) in defaults.chain(recorded).collect::<Vec<(Preset, LossSpec)>>() {
            for setting in KnownSpec::new(&self.schema, spec).settings {
                self.projects.entry(setting).or_default().insert(project);
            }
        }
    }

    fn write(mut self) -> String {
        let _ = writeln!(self.text, "# The spec, field by field\n\n{WRITTEN}\n");
        self.text += HEAD;
        let root = self.schema.root.clone();
        let keys: Vec<(String, Value)> =
            fields(&root).into_iter().filter(|(_, property)| property["deprecated"] != Value::Bool(true)).collect();
        // The formulas of the whole, with keys in the place of links.
        let words = root["description"].as_str().unwrap();
        let body = words.split_once("\n\n").unwrap().1;
        let body = body.split("\n\nA file may leave out").next().unwrap();
        let _ = writeln!(self.text, "## The loss\n\n{}\n", prose(body));
        self.text += "## All fields\n\n| key | default | |\n|---|---|---|\n";
        for (key, property) in &keys {
            let default = self.short_default(property);
            let sentence = first_sentence(property["description"].as_str().unwrap());
            let _ = writeln!(self.text, "| [`{key}`](#{}) | {default} | {sentence} |", anchor(key));
        }
        for (key, property) in &keys {
            self.section(key, property);
        }
        while self.text.contains("\n\n\n") {
            self.text = self.text.replace("\n\n\n", "\n\n");
        }
        self.text.trim_end().to_string() + "\n"
    }

    /// Writes the section of one field of the spec.
    fn section(&mut self, key: &str, property: &Value) {
        let node = self.schema.resolve(property).clone();
        let node = if node["items"].is_object() { self.schema.resolve(&node["items"]).clone() } else { node };
        let words = property["description"].as_str().unwrap();
        let _ = writeln!(self.text, "\n## {key}\n\n{}\n", prose(words));
        // The type says more than the field where it has a name of its own.
        let named = type_of(property).is_some() || property["items"].is_object();
        if let Some(of_type) = node["description"].as_str().filter(|of_type| named && *of_type != words) {
            let _ = writeln!(self.text, "{}\n", prose(of_type));
        }
        let default = yaml(property.get("default").unwrap_or(&Value::Null));
        let _ = writeln!(self.text, "Type: {}; default `{default}`.\n", self.kind(property));
        self.shown.clear();
        if node["oneOf"].is_array() {
            self.choices(key, &node);
        } else {
            self.meaning(key);
            self.keys(key, &node, 0, &self.uses(key));
        }
    }

    /// Writes the choices of a field, each under a heading.
    fn choices(&mut self, path: &str, node: &Value) {
        for choice in node["oneOf"].as_array().unwrap() {
            let (name, content) = arm(choice);
            let words = choice["description"].as_str().unwrap_or_default();
            let setting = format!("{path}: {name}");
            let _ = writeln!(self.text, "### {setting}\n\n{}\n", prose(words));
            let Some(content) = content else {
                self.meaning(&setting);
                continue;
            };
            let inner = self.schema.resolve(&content).clone();
            if let (Some(_), Some(words)) = (type_of(&content), inner["description"].as_str()) {
                let _ = writeln!(self.text, "{}\n", prose(words));
            }
            self.meaning(&setting);
            self.keys(&format!("{path}.{name}"), &inner, 0, &self.uses(&setting));
        }
    }

    /// Writes the keys of a mapping as a list at a depth; `around` is what the mapping itself says of its users.
    fn keys(&mut self, path: &str, node: &Value, depth: usize, around: &str) {
        let indent = " ".repeat(4 * depth);
        for (key, property) in fields(node) {
            let (full, inner) = (format!("{path}.{key}"), self.schema.resolve(&property).clone());
            let required = node["required"].as_array().is_some_and(|keys| keys.iter().any(|name| *name == key));
            let default = match property.get("default") {
                Some(default) => format!("default `{}`", yaml(default)),
                None if required => "required".into(),
                None => "default `null`".into(),
            };
            let uses = self.uses(&full);
            // What is said of the mapping is not said again of its keys.
            let uses = if uses == around { String::new() } else { uses };
            let words = property["description"].as_str().unwrap_or_default();
            self.item(&indent, &format!("`{key}`: {}, {default}. {words}{uses}", self.kind(&property)));
            self.formula(&full, &" ".repeat(4 * depth + 4));
            // Small types are written where they are used; what has a section of its own is linked to.
            if section_of(&property).is_some() {
                continue;
            }
            if inner["oneOf"].is_array() && type_of(&property) != Some("Temperature") {
                self.small_choices(&full, &inner, depth + 1);
            } else if inner["properties"].is_object() {
                self.keys(&full, &inner, depth + 1, &self.uses(&full));
            }
        }
        if depth == 0 {
            self.text.push('\n');
        }
    }

    /// Writes the choices of a key as a list.
    fn small_choices(&mut self, path: &str, node: &Value, depth: usize) {
        let indent = " ".repeat(4 * depth);
        for choice in node["oneOf"].as_array().unwrap() {
            let (name, content) = arm(choice);
            let words = choice["description"].as_str().unwrap_or_default();
            let takes = content.map_or(String::new(), |content| format!(" ({})", self.kind(&content)));
            let uses = self.uses(&format!("{path}: {name}"));
            self.item(&indent, &format!("`{name}`{takes}: {words}{uses}"));
        }
    }

    fn item(&mut self, indent: &str, words: &str) {
        let _ = writeln!(self.text, "{indent}- {}", wrapped(words, &format!("{indent}    "), WIDTH - indent.len()));
    }

    /// Writes the formula, an example and the users of a setting.
    fn meaning(&mut self, setting: &str) {
        self.formula(setting, "");
        let uses = self.uses(setting);
        if !uses.is_empty() {
            let _ = writeln!(self.text, "{}\n", wrapped(&uses, "", WIDTH));
        }
    }

    /// Writes the formula of a setting as the plainest spec that has it describes it, once.
    fn formula(&mut self, setting: &str, indent: &str) {
        let field = setting.split(['.', ':']).next().unwrap();
        let Some((_, labels)) = LINES.iter().find(|(name, _)| *name == field) else { panic!("no line for {field}") };
        let with = self.variants.iter().map(|(known, _)| known).filter(|known| known.settings.contains(setting));
        let Some(known) = with.min_by_key(|known| known.settings.len()) else { return };
        let described = known.spec.describe();
        let lines = described.lines().filter(|line| labels.contains(&line.split(' ').next().unwrap()));
        let formula = lines.fold(String::new(), |text, line| text + &format!("{indent}# {line}\n"));
        let example = yaml(&without_defaults(&self.schema, known, field));
        if formula.is_empty() || !self.shown.insert(example.clone()) {
            return;
        }
        let blank = if indent.is_empty() { "" } else { "\n" };
        let _ = writeln!(self.text, "{blank}{indent}```yaml\n{indent}{field}: {example}\n{formula}{indent}```\n");
    }

    /// Returns who has a setting, and which implementations do not compute it.
    fn uses(&self, setting: &str) -> String {
        let mut text = String::new();
        if let Some(projects) = self.projects.get(setting) {
            let all = projects.len() == Preset::ALL.len();
            let names: Vec<&str> = projects.iter().map(|project| project.name()).collect();
            let _ = write!(text, " *Projects: {}.*", if all { "all".into() } else { names.join(", ") });
        }
        let with = self.variants.iter().filter(|(known, _)| known.settings.contains(setting));
        let with: Vec<&BTreeSet<String>> = with.map(|(_, refused)| refused).collect();
        if with.is_empty() {
            return text;
        }
        let refuses = |id: &&String| with.iter().all(|refused| refused.contains(*id));
        let (refused, computed): (Vec<&String>, Vec<&String>) = self.implementations.iter().partition(|id| refuses(id));
        let who = match (refused.len(), computed.len()) {
            (0, _) => String::new(),
            (_, 0) => " *Computed by the reference alone.*".into(),
            (no, yes) if no > yes => format!(" *Computed by the reference and {} alone.*", families(&computed)),
            _ => format!(" *Not computed by {}.*", families(&refused)),
        };
        text + &who
    }

    /// Returns the type of a property in words.
    fn kind(&self, property: &Value) -> String {
        let node = self.schema.resolve(property);
        let optional = property["anyOf"].is_array() || has_type(property, "null");
        let or_none = if optional { " or none" } else { "" };
        if property["items"].is_object() {
            let of = self.kind(&property["items"]);
            return if of == "mapping" { "list of mappings".into() } else { format!("list of {of}s") };
        }
        if let Some(section) = section_of(property) {
            return format!("as [`{section}`](#{}){or_none}", anchor(&section));
        }
        if node["oneOf"].is_array() {
            return if type_of(property) == Some("Temperature") {
                "number > 0 or `given`".into()
            } else {
                format!("choice{or_none}")
            };
        }
        let bound = |key: &str| node[key].as_i64();
        let kind = ["number", "integer", "boolean"].into_iter().find(|name| has_type(node, name));
        let Some(kind) = kind else { return format!("mapping{or_none}") };
        let low = bound("minimum")
            .map(|x| format!(" ≥ {x}"))
            .or_else(|| bound("exclusiveMinimum").map(|x| format!(" > {x}")));
        let high = bound("maximum").map(|x| format!(", ≤ {x}"));
        format!("{kind}{}{}{or_none}", low.unwrap_or_default(), high.unwrap_or_default())
    }

    fn short_default(&self, property: &Value) -> String {
        let default = property.get("default").unwrap_or(&Value::Null);
        match default {
            Value::Object(fields) if fields.len() == 1 && self.schema.resolve(property)["oneOf"].is_array() => {
                format!("`{}`", fields.keys().next().unwrap())
            }
            Value::Object(_) => "see there".into(),
            default => format!("`{}`", yaml(default)),
        }
    }
}

/// Returns the key or choice whose section describes the type of `property`, where that is another place.
fn section_of(property: &Value) -> Option<String> {
    let described_elsewhere = match (type_of(property)?, property["description"].as_str().unwrap_or_default()) {
        ("PpoClip", words) if words.contains("not selected") => "objective: ppo_clip",
        ("Reduction", words) if !words.starts_with("The reduction of token") => "reduction",
        ("Averaging", words) if words.contains("entropy") => return None,
        _ => return None,
    };
    Some(described_elsewhere.into())
}

impl KnownSpec {
    fn new(schema: &SpecSchema, spec: LossSpec) -> Self {
        let value = serde_json::to_value(&spec).unwrap();
        let mut settings = BTreeSet::new();
        note_settings(schema, &schema.root, &value, "", &mut settings);
        Self { spec, value, settings }
    }
}

/// Notes the settings of `value`: keys whose value is not the default, and choices.
fn note_settings(schema: &SpecSchema, node: &Value, value: &Value, path: &str, noted: &mut BTreeSet<String>) {
    let node = schema.resolve(node);
    if value.is_null() {
        return;
    }
    if let Some(items) = value.as_array() {
        for item in items {
            noted.insert(path.into());
            note_settings(schema, &node["items"], item, path, noted);
        }
        return;
    }
    // An arm: a word, or a mapping of one key.
    if node["oneOf"].is_array() {
        match value {
            Value::String(name) => {
                noted.insert(format!("{path}: {name}"));
            }
            Value::Object(fields) => {
                let (name, content) = fields.iter().next().unwrap();
                noted.insert(format!("{path}: {name}"));
                let arms = node["oneOf"].as_array().unwrap();
                let arm = arms.iter().find_map(|arm| arm["properties"].get(name)).unwrap();
                note_settings(schema, arm, content, &format!("{path}.{name}"), noted);
            }
            _ => {
                noted.insert(format!("{path}: number"));
            }
        }
        return;
    }
    for (key, property) in fields(node) {
        let Some(value) = value.get(&key) else { continue };
        let path = if path.is_empty() { key } else { format!("{path}.{key}") };
        if Some(value) != property.get("default") {
            noted.insert(path.clone());
        }
        note_settings(schema, &property, value, &path, noted);
    }
}

/// Returns the part of a spec under `field` without what is the default.
fn without_defaults(schema: &SpecSchema, known: &KnownSpec, field: &str) -> Value {
    let property = &schema.root["properties"][field];
    trimmed(schema, property, &known.value[field])
}

fn trimmed(schema: &SpecSchema, node: &Value, value: &Value) -> Value {
    let node = schema.resolve(node);
    match value {
        Value::Array(items) => items.iter().map(|item| trimmed(schema, &node["items"], item)).collect(),
        Value::Object(entries) if node["oneOf"].is_array() => {
            let (name, content) = entries.iter().next().unwrap();
            let arm = node["oneOf"].as_array().unwrap().iter().find_map(|arm| arm["properties"].get(name)).unwrap();
            Value::Object([(name.clone(), trimmed(schema, arm, content))].into_iter().collect())
        }
        Value::Object(entries) => {
            let kept = entries.iter().filter(|(key, value)| node["properties"][*key].get("default") != Some(value));
            kept.map(|(key, value)| (key.clone(), trimmed(schema, &node["properties"][key], value))).collect()
        }
        value => value.clone(),
    }
}

/// Returns the ids of the implementations that refuse `spec`.
fn refusals<P: Workload>(
    all: &[std::sync::Arc<dyn Implementation<P>>],
    shape: P::Shape,
    spec: &LossSpec,
) -> BTreeSet<String> {
    let plain = LossSpec::default();
    let refuses = |each: &&std::sync::Arc<dyn Implementation<P>>| {
        let devices =
            [1, 2, 4, 8].into_iter().find(|&n| each.supports(&plain, shape, Dtype::F32, n).is_ok()).unwrap_or(1);
        each.supports(spec, shape, Dtype::F32, devices).is_err()
    };
    all.iter().filter(refuses).map(|each| each.id().to_string()).collect()
}

fn ids<P: Workload>(all: &[std::sync::Arc<dyn Implementation<P>>]) -> impl Iterator<Item = String> {
    all.iter().map(|each| each.id().to_string()).collect::<Vec<_>>().into_iter()
}

/// Lists ids with one word for a program and its ways of being cut over devices.
fn families(ids: &[&String]) -> String {
    let mut stems: Vec<String> = Vec::new();
    for id in ids {
        let cuts = ["-driver", "-scattered", "-rows", "-vocab", "-mesh"];
        let stem = cuts.iter().fold(id.as_str(), |id, cut| id.strip_suffix(cut).unwrap_or(id));
        let stem = format!("`{stem}`");
        if !stems.contains(&stem) {
            stems.push(stem);
        }
    }
    match stems.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} and {last}", others.join(", ")),
        _ => stems.concat(),
    }
}

/// Returns the name of an arm, and the schema of what it holds.
fn arm(choice: &Value) -> (String, Option<Value>) {
    match (choice["const"].as_str(), fields(choice).into_iter().next()) {
        (Some(name), _) => (name.into(), None),
        (None, Some((name, content))) => (name, Some(content)),
        (None, None) => ("number".into(), None),
    }
}

/// Returns a doc comment as Markdown: its formulas are code, its paragraphs of the page's width.
fn prose(words: &str) -> String {
    let mut paragraphs: Vec<String> = Vec::new();
    let mut rest = words;
    while let Some((before, code)) = rest.split_once("```text\n") {
        paragraphs
            .extend(before.split("\n\n").filter(|text| !text.trim().is_empty()).map(|text| wrapped(text, "", WIDTH)));
        let (code, after) = code.split_once("```").unwrap();
        paragraphs.push(format!("```text\n{}```", code.replace('`', "")));
        rest = after;
    }
    paragraphs.extend(rest.split("\n\n").filter(|text| !text.trim().is_empty()).map(|text| wrapped(text, "", WIDTH)));
    paragraphs.join("\n\n")
}

fn first_sentence(words: &str) -> String {
    let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
    let end = words.find(". ").map_or(words.len(), |at| at + 1);
    words[..end].replace('|', "\\|")
}

/// The anchor of a heading, on the site and on GitHub.
fn anchor(setting: &str) -> String {
    setting.replace(": ", "-")
}

/// Returns a value as YAML in one line.
fn yaml(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Array(items) => format!("[{}]", items.iter().map(yaml).collect::<Vec<_>>().join(", ")),
        Value::Object(entries) => {
            let entries = entries.iter().map(|(key, value)| match value {
                Value::Object(inner) if inner.is_empty() => format!("{key}: {{}}"),
                value => format!("{key}: {}", yaml(value)),
            });
            format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
        }
        Value::Number(number) => {
            let x = number.as_f64().unwrap();
            if x.fract() == 0.0 { format!("{x:.0}") } else { format!("{x}") }
        }
        other => other.to_string().trim_matches('"').to_string(),
    }
}

/// The beginning of the page.
const HEAD: &str = "\
For everybody who writes a loss as a file, or reads one that `assay spec` printed: every key with its type, its bounds, its default and its
formula, the projects that have it, and the implementations that do not compute it. What a project's own options mean is in
[support.md](support.md#in-a-projects-own-words).

*Projects* are those of the presets: a key is listed if its value is not the default, and a choice if it is made, by one of a project's functions
with its own defaults or in one of its runs that are recorded in [fixtures/peers](../fixtures/peers/README.md). Every key is computed by the
reference; *not computed by* lists the implementations that refuse it by name. The table in
[support.md](support.md#who-computes-what) has the same for combinations.

## In an editor

```sh
assay spec --schema > loss-spec.schema.json
```

prints a JSON Schema. With this first line, an editor that has a YAML language server completes the keys of a spec, shows these
descriptions and marks what is wrong:

```yaml
# yaml-language-server: $schema=loss-spec.schema.json
objective: {ppo_clip: {epsilon_high: 0.28}}
kl: {beta: 0.04, estimator: k3}
```

Settings that exclude each other are beyond a schema: `assay spec --spec FILE` finds them.

";
