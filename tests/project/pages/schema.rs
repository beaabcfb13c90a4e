//! The JSON Schema of specs: made from the types, its descriptions in a file's words, its bounds asked of the spec's own check.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use assay::judge::variants::variants;
use assay::spec::presets::{self, BatchInputs, Preset, PresetOptions};
use assay::spec::{LossSpec, SpecError};
use serde_json::{Map, Value, json};

use super::hold;

/// The file that `assay spec --schema` prints.
const FILE: &str = "docs/data/loss-spec.schema.json";

#[test]
fn pages_schema_is_that_of_the_types() {
    hold(FILE, &(serde_json::to_string_pretty(&SpecSchema::new().root).unwrap() + "\n"));
}

/// The schema, with what follows from it.
pub(super) struct SpecSchema {
    pub(super) root: Value,
    /// The path of the first key or choice that has each type, such as `ratio.level` of `RatioLevel`.
    paths: BTreeMap<String, String>,
}

impl SpecSchema {
    pub(super) fn new() -> Self {
        let root = LossSpec::json_schema();
        let mut schema = Self { paths: BTreeMap::new(), root };
        schema.find_paths(&schema.root.clone(), "");
        schema.root["title"] = json!("GRPO loss");
        // Descriptions link to the docs of the types; a file has keys and choices.
        let mut root = std::mem::take(&mut schema.root);
        schema.describe(&mut root);
        schema.root = root;
        // A default that is not written is left out of the schema too.
        schema.root["properties"]["ids_per_token"]["default"] = json!(LossSpec::default().ids_per_token);
        schema.set_bounds();
        // Old keys are read; editors strike them out.
        for (old, new) in LossSpec::OLD_KEYS {
            let mut property = schema.root["properties"][new].clone();
            property["description"] = json!(format!("The old name of `{new}`."));
            property["deprecated"] = json!(true);
            property.as_object_mut().unwrap().remove("default");
            schema.root["properties"][old] = property;
        }
        schema
    }

    /// Returns the definition that `node` refers to, alone or beside null, or the node itself.
    pub(super) fn resolve<'s>(&'s self, node: &'s Value) -> &'s Value {
        match type_of(node) {
            Some(name) => &self.root["$defs"][name],
            None => node,
        }
    }

    /// Notes the path of each type, the outermost first.
    fn find_paths(&mut self, node: &Value, path: &str) {
        let mut below: Vec<(String, Value)> = Vec::new();
        for (key, property) in children(node) {
            let path = if path.is_empty() { key } else { format!("{path}.{key}") };
            // The elements of an array have its path.
            if let Some(name) = type_of(&property).or_else(|| type_of(&property["items"])).map(str::to_string) {
                if self.paths.contains_key(&name) {
                    continue;
                }
                self.paths.insert(name.clone(), path.clone());
                below.push((path, self.root["$defs"][&name].clone()));
            } else {
                below.push((path, property));
            }
        }
        for (path, node) in below {
            self.find_paths(&node, &path);
        }
    }

    /// Puts all descriptions below `node` into a file's words.
    fn describe(&self, node: &mut Value) {
        match node {
            Value::Object(fields) => {
                fields.remove("format");
                for (key, value) in fields {
                    match value {
                        Value::String(text) if key == "description" => *text = self.in_words_of_a_file(text),
                        _ => self.describe(value),
                    }
                }
            }
            Value::Array(nodes) => nodes.iter_mut().for_each(|node| self.describe(node)),
            _ => {}
        }
    }

    /// Returns a doc comment with links to types, fields and arms replaced by keys and choices.
    fn in_words_of_a_file(&self, text: &str) -> String {
        let mut words = String::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once('[') {
            words += before;
            // A link has a target in parentheses, or is code.
            let linked = after.split_once(']').map(|(inside, after)| {
                let target = after.strip_prefix('(').and_then(|after| after.split_once(')'));
                (inside, target.is_some(), target.map_or(after, |(_, after)| after))
            });
            match linked {
                Some((inside, targeted, after)) if targeted || inside.starts_with('`') => {
                    words += &match inside.strip_prefix('`').and_then(|code| code.strip_suffix('`')) {
                        Some(code) => format!("`{}`", self.name_in_a_file(code)),
                        None => inside.to_string(),
                    };
                    rest = after;
                }
                _ => {
                    words.push('[');
                    rest = after;
                }
            }
        }
        // Examples in the docs are Rust; types are also named without a link.
        let named = without_examples(&(words + rest));
        let plain = |word: &str| match word {
            "K1" | "K2" | "K3" => word.to_lowercase(),
            "`None`" => "none".into(),
            _ => word.to_string(),
        };
        named.split(' ').map(plain).collect::<Vec<_>>().join(" ")
    }

    /// Returns the key or choice of a file for `code`, the path of a type, a field or an arm.
    fn name_in_a_file(&self, code: &str) -> String {
        let (code, argument) = code.strip_suffix(')').and_then(|code| code.split_once('(')).unwrap_or((code, ""));
        let of_type = |name: &str| self.paths.get(name).map(String::as_str);
        let named = match code.split_once("::") {
            None => of_type(code).map_or_else(|| snake(code), str::to_string),
            Some(("Self" | "LossSpec", item)) => snake(item),
            Some((owner, item)) => match (of_type(owner), item.starts_with(char::is_uppercase)) {
                (Some(path), true) => format!("{path}: {}", snake(item)),
                (Some(path), false) => format!("{path}.{item}"),
                (None, _) => snake(item),
            },
        };
        match (argument, named.rsplit_once(": ")) {
            ("", _) => named,
            (number, Some((key, choice))) => format!("{key}: {{{choice}: {number}}}"),
            (number, None) => format!("{named}: {number}"),
        }
    }

    /// Sets the bounds of all numbers as [`LossSpec::check`] has them.
    fn set_bounds(&mut self) {
        let specs: Vec<Value> = variants().iter().map(|variant| serde_json::to_value(&variant.spec).unwrap()).collect();
        let mut found: BTreeMap<String, NumberBounds> = BTreeMap::new();
        for spec in &specs {
            let mut numbers = Vec::new();
            self.numbers(&self.root, spec, "", &mut numbers);
            for (place, pointer, integer) in numbers {
                let bounds = found.entry(place).or_insert_with(|| NumberBounds::new(integer));
                bounds.ask(spec, &pointer);
            }
        }
        for (place, bounds) in found {
            let node = self.root.pointer_mut(&place).unwrap();
            for keyword in ["minimum", "exclusiveMinimum", "maximum"] {
                node.as_object_mut().unwrap().remove(keyword);
            }
            for (keyword, bound) in bounds.keywords() {
                node[keyword] = json!(bound);
            }
        }
    }

    /// Lists the numbers of `spec`: the place of each in the schema, its pointer in the spec, and whether it is an integer.
    fn numbers(&self, node: &Value, spec: &Value, at: &str, found: &mut Vec<(String, String, bool)>) {
        self.numbers_below(node, "", spec, at, found);
    }

    fn numbers_below(
        &self,
        node: &Value,
        place: &str,
        spec: &Value,
        at: &str,
        found: &mut Vec<(String, String, bool)>,
    ) {
        if let Some(name) = type_of(node) {
            // A setting that is absent has no numbers.
            if !spec.is_null() {
                self.numbers_below(&self.root["$defs"][name], &format!("/$defs/{name}"), spec, at, found);
            }
            return;
        }
        if has_type(node, "number") || has_type(node, "integer") {
            found.push((place.into(), at.into(), has_type(node, "integer")));
        }
        if let (Some(items), Some(first)) = (node.get("items"), spec.get(0)) {
            self.numbers_below(items, &format!("{place}/items"), first, &format!("{at}/0"), found);
        }
        for (key, property) in node["properties"].as_object().into_iter().flatten() {
            let (place, at) = (format!("{place}/properties/{key}"), format!("{at}/{key}"));
            self.numbers_below(property, &place, spec.get(key).unwrap_or(&Value::Null), &at, found);
        }
        for (i, choice) in node["oneOf"].as_array().into_iter().flatten().enumerate() {
            let tag = choice["properties"].as_object().and_then(|tags| tags.keys().next());
            if tag.is_some_and(|tag| spec.get(tag).is_some()) {
                self.numbers_below(choice, &format!("{place}/oneOf/{i}"), spec, at, found);
            }
        }
    }

    /// Whether the schema takes `value`; the reader of the subset of JSON Schema that [`Self::new`] makes.
    fn takes(&self, node: &Value, value: &Value) -> bool {
        if let Some(name) = node["$ref"].as_str().and_then(|path| path.strip_prefix("#/$defs/")) {
            return self.takes(&self.root["$defs"][name], value);
        }
        let any =
            |key: &str| node[key].as_array().map(|nodes| nodes.iter().filter(|node| self.takes(node, value)).count());
        let number = |key: &str, holds: fn(f64, f64) -> bool| {
            node[key].as_f64().is_none_or(|bound| value.as_f64().is_none_or(|x| holds(x, bound)))
        };
        let types: Vec<&str> = ["null", "number", "integer", "boolean", "string", "array", "object"]
            .into_iter()
            .filter(|name| has_type(node, name))
            .collect();
        let is = |name: &&str| match *name {
            "null" => value.is_null(),
            "number" => value.is_number(),
            "integer" => value.is_u64() || value.is_i64(),
            "boolean" => value.is_boolean(),
            "string" => value.is_string(),
            "array" => value.is_array(),
            _ => value.is_object(),
        };
        let properties = node["properties"].as_object();
        let field = |(key, value): (&String, &Value)| match properties.and_then(|properties| properties.get(key)) {
            Some(property) => self.takes(property, value),
            None => node["additionalProperties"] != json!(false),
        };
        let required = || node["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
        (types.is_empty() || types.iter().any(is))
            && node.get("const").is_none_or(|only| only == value)
            && any("oneOf").is_none_or(|taken| taken == 1)
            && any("anyOf").is_none_or(|taken| taken >= 1)
            && number("minimum", |x, bound| x >= bound)
            && number("exclusiveMinimum", |x, bound| x > bound)
            && number("maximum", |x, bound| x <= bound)
            && value
                .as_object()
                .is_none_or(|fields| fields.iter().all(field) && required().all(|key| fields.contains_key(key)))
            && value.as_array().is_none_or(|items| items.iter().all(|item| self.takes(&node["items"], item)))
    }
}

/// Returns the children of `node` by key or choice: properties, and arms with a value.
fn children(node: &Value) -> Vec<(String, Value)> {
    let arms = node["oneOf"].as_array().into_iter().flatten().flat_map(fields);
    fields(node).into_iter().chain(arms).collect()
}

/// Returns the name of the type that `node` refers to, alone or beside null.
pub(super) fn type_of(node: &Value) -> Option<&str> {
    referred(node).or_else(|| node["anyOf"].as_array()?.iter().find_map(referred))
}

fn referred(node: &Value) -> Option<&str> {
    node["$ref"].as_str()?.strip_prefix("#/$defs/")
}

/// Whether `node` names `wanted` as its type, or as one of several.
pub(super) fn has_type(node: &Value, wanted: &str) -> bool {
    match &node["type"] {
        Value::String(name) => name == wanted,
        Value::Array(names) => names.iter().any(|name| name == wanted),
        _ => false,
    }
}

/// Returns a doc comment without its blocks of Rust; formulas are blocks of `text`.
fn without_examples(words: &str) -> String {
    let mut kept = Vec::new();
    let mut example = false;
    let mut formula = false;
    for line in words.lines() {
        match line.strip_prefix("```") {
            Some("text") => formula = true,
            Some(_) if !formula => {
                example = !example;
                continue;
            }
            Some(_) => formula = false,
            None => {}
        }
        if !example {
            kept.push(line);
        }
    }
    kept.join("\n").trim_end().to_string()
}

/// Returns the name of an arm as serde's `snake_case` has it.
pub(super) fn snake(name: &str) -> String {
    let mut snake = String::new();
    for (i, c) in name.chars().enumerate() {
        if i > 0 && c.is_uppercase() {
            snake.push('_');
        }
        snake.extend(c.to_lowercase());
    }
    snake
}

/// The smallest step that is tried beside a bound.
const STEP: f64 = 1e-9;

/// The numbers that a key is tried with.
const TRIED: [f64; 6] = [-1.0, 0.0, STEP, 1.0, 1.0 + STEP, 2.0];

/// The answers of the check about one number: `false` where it refuses that number itself in all specs.
struct NumberBounds {
    integer: bool,
    asked: usize,
    taken: [bool; TRIED.len()],
}

impl NumberBounds {
    /// Specs that have a number and are asked about it.
    const ASKED: usize = 6;

    fn new(integer: bool) -> Self {
        Self { integer, asked: 0, taken: [false; TRIED.len()] }
    }

    fn ask(&mut self, spec: &Value, pointer: &str) {
        if self.asked == Self::ASKED {
            return;
        }
        self.asked += 1;
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        for (taken, x) in self.taken.iter_mut().zip(TRIED) {
            let mut changed = spec.clone();
            let number = if self.integer { json!(x.round() as i64) } else { json!(x) };
            let owner = changed.pointer_mut(parent).unwrap();
            match owner.as_array_mut() {
                Some(items) => items[key.parse::<usize>().unwrap()] = number,
                None => owner[key] = number,
            }
            let refused = serde_json::from_value::<LossSpec>(changed).map(|spec| spec.check());
            // What another field refuses is no bound of this one.
            *taken |= match refused {
                Ok(Ok(())) => true,
                Ok(Err(SpecError { field, expected, .. })) => {
                    field.rsplit('.').next() != Some(key) || !expected.contains(['≥', '>', '1'])
                }
                Err(_) => false,
            };
        }
    }

    fn keywords(&self) -> Vec<(&'static str, i64)> {
        let [below, zero, step, one, above, two] = self.taken;
        let mut keywords = Vec::new();
        match (below, zero, step || self.integer, one) {
            (true, ..) => return keywords,
            (_, true, ..) => keywords.push(("minimum", 0)),
            (_, _, _, true) if self.integer => keywords.push(("minimum", 1)),
            (_, _, true, _) => keywords.push(("exclusiveMinimum", 0)),
            (_, _, _, false) if above => keywords.push(("exclusiveMinimum", 1)),
            _ => return keywords,
        }
        if one && !above && !two {
            keywords.push(("maximum", 1));
        }
        keywords
    }
}

/// Specs that serde or the check refuses, each for one reason.
const WRONG: [&str; 14] = [
    r#"{"objectiv": "none"}"#,
    r#"{"objective": "ppo"}"#,
    r#"{"objective": {"ppo_clip": {"epsilon": 0.2}}}"#,
    r#"{"objective": {"ppo_clip": {"epsilon_low": -0.1}}}"#,
    r#"{"objective": {"ppo_clip": {"dual_clip": 1}}}"#,
    r#"{"objective": {"cispo": {"lower": 0.8}}}"#,
    r#"{"kl": {"estimator": "k3"}}"#,
    r#"{"kl": {"beta": 0.1, "estimator": "k4"}}"#,
    r#"{"kl": {"beta": "0.1"}}"#,
    r#"{"temperature": 0}"#,
    r#"{"temperature": "taken"}"#,
    r#"{"reduction": "sequence_mean"}"#,
    r#"{"top_entropy": {"fraction": 1.5}}"#,
    r#"{"ids_per_token": 0}"#,
];

#[test]
fn pages_schema_takes_what_is_read_and_nothing_else() {
    let schema = SpecSchema::new();
    let takes = |spec: &Value| schema.takes(&schema.root, spec);
    for text in WRONG {
        let value: Value = serde_json::from_str(text).unwrap();
        let read = serde_json::from_str::<LossSpec>(text).map(|spec| spec.check());
        assert!(!matches!(read, Ok(Ok(()))), "{text}");
        assert!(!takes(&value), "{text}");
    }
    for text in [r#"{"head": {"softcap": 30}}"#, r#"{"kl": null}"#, r#"{"temperature": "given"}"#, "{}"] {
        assert!(serde_json::from_str::<LossSpec>(text).is_ok_and(|spec| spec.check().is_ok()), "{text}");
        assert!(takes(&serde_json::from_str(text).unwrap()), "{text}");
    }
    let of_projects = Preset::ALL
        .iter()
        .map(|&preset| presets::spec(preset, None, &PresetOptions::default(), &BatchInputs::default()).unwrap().spec);
    for spec in variants().into_iter().map(|variant| variant.spec).chain(of_projects) {
        let value = serde_json::to_value(&spec).unwrap();
        assert!(takes(&value), "{value}");
    }
}

#[test]
fn pages_schema_has_the_words_of_a_file() {
    let text = serde_json::to_string(&SpecSchema::new().root).unwrap();
    let mut foreign = String::new();
    for word in ["[`", "::", "](", "`Rows", "`Reduction", "`Self"] {
        if let Some(at) = text.find(word) {
            let from = text[..at].char_indices().rev().nth(60).map_or(0, |(at, _)| at);
            let _ = writeln!(foreign, "{word}: {}", text[from..].chars().take(140).collect::<String>());
        }
    }
    assert_eq!(foreign, "");
}

/// An object's fields, in order.
pub(super) fn fields(node: &Value) -> Map<String, Value> {
    node["properties"].as_object().cloned().unwrap_or_default()
}
