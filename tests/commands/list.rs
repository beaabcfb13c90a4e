//! `assay list`: the implementations, and what they support.

use std::fs;

use super::workplace::{Workplace, assert_narrow, read_json};
use crate::common::command::assay;
use serde_json::Value;
use tempfile::TempDir;

#[test]
fn list_matrix_has_every_variant_and_implementation() {
    let folder = TempDir::new().unwrap();
    let json = folder.path().join("matrix.json");
    let table = assay(&["list", "--matrix", "--json", json.to_str().unwrap()]);
    let markdown = assay(&["list", "--markdown"]);
    assert_eq!((table.code, markdown.code), (0, 0), "{}{}", table.stderr, markdown.stderr);
    let rows = read_json(&json);
    let variants = assay::judge::variants::variants();
    // And one for how a batch lies.
    let (of_batch, rows) = rows.as_array().unwrap().split_last().unwrap();
    assert_eq!((of_batch["field"].as_str(), of_batch["choice"].as_str()), (Some("sequences"), Some("packed")));
    assert_eq!(rows.len(), variants.len());
    assert_eq!(markdown.stdout.lines().count(), variants.len() + 1 + 2);
    assert!(markdown.stdout.contains("| objective | ppo_clip | yes | yes |"), "{}", markdown.stdout);
    assert!(markdown.stdout.contains("no: `top_entropy`"), "{}", markdown.stdout);
    for (row, variant) in rows.iter().zip(variants) {
        assert_eq!((row["field"].as_str(), row["choice"].as_str()), (Some(variant.field), Some(variant.choice)));
        assert_eq!(row["support"]["reference"], "yes");
        for implementation in assay::registry::registry(None) {
            assert!(!row["support"][implementation.id()].is_null(), "{} {row}", implementation.id());
            assert!(table.stdout.contains(implementation.id()));
        }
        assert!(table.stdout.contains(variant.choice), "{}", variant.choice);
    }
}

#[test]
fn list_matrix_goes_between_its_marks_in_a_document() {
    let workplace = Workplace::new();
    let document = workplace.path("support.md");
    let list = || assay(&["list", "--quiet", "--markdown", "--into", &document]);
    fs::write(&document, "before\n<!-- assay list --markdown -->\nold\n<!-- end of matrix -->\nafter\n").unwrap();
    assert_eq!(list().code, 0);
    let text = fs::read_to_string(&document).unwrap();
    let summary = text.split("<!-- ").nth(1).unwrap();
    assert!(text.starts_with("before\n<!-- assay list --markdown -->\n| computed by |"), "{text}");
    assert!(text.ends_with("<!-- end of matrix -->\nafter\n"), "{text}");
    // Each choice is counted once, and the whole is data.
    let counts = summary.lines().filter_map(|line| line.split(" | ").nth(1)?.trim().parse::<usize>().ok());
    let data = fs::read_to_string(workplace.path("data/support.csv")).unwrap();
    assert_eq!(counts.sum::<usize>(), data.lines().count() - 1);
    let matrix = assay(&["list", "--markdown"]).stdout;
    assert_eq!(matrix.lines().count(), data.lines().count() + 1);
    if cfg!(feature = "pjrt") {
        let shipped = fs::read_to_string("docs/support.md").unwrap();
        assert!(shipped.contains(summary), "`assay list --markdown --into docs/support.md`");
        assert_eq!(fs::read_to_string("docs/data/support.csv").unwrap(), data);
    }
    fs::write(&document, "nothing to fill\n").unwrap();
    let refused = list();
    assert!(refused.code == 2 && refused.stderr.contains("`<!-- assay list --markdown -->`"), "{}", refused.stderr);
    assert_eq!(fs::read_to_string(&document).unwrap(), "nothing to fill\n");
}

#[test]
fn list_shows_every_implementation() {
    let folder = TempDir::new().unwrap();
    let json = folder.path().join("list.json");
    let output = assay(&["list", "--json", json.to_str().unwrap()]);
    assert_eq!(output.code, 0);
    let listed = read_json(&json);
    for implementation in assay::registry::registry(None) {
        assert!(output.stdout.contains(&format!("│ {} ", implementation.id())), "{}", output.stdout);
        assert!(listed.as_array().unwrap().iter().any(|entry| entry["id"] == implementation.id()));
    }
    assert_narrow(&output.stdout);
    // Descriptions and refused options are broken over lines; those of several implementations are said once.
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let (table, below) = output.stdout.split_once('└').expect("a table");
    let descriptions: Vec<&str> = table.lines().filter_map(|line| line.rsplit_once('┆')?.1.strip_suffix('│')).collect();
    let descriptions = words(&descriptions.join(" "));
    let below = words(below);
    #[cfg(feature = "pjrt")]
    if let Ok(path) = assay::runtime::locate(None) {
        let client = assay::runtime::Client::shared(&path).unwrap();
        let said = format!("devices {} of {}, platform cpu plugin ", client.device_count(), client.device_kind());
        assert!(below.contains(&said) && below.contains("(C API 0."), "{below}");
    }
    for entry in listed.as_array().unwrap() {
        assert!(descriptions.contains(entry["summary"].as_str().unwrap()), "{entry} {descriptions}");
        let options: Vec<&str> = entry["unsupported"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        // What stands before the first says what is not here.
        let groups = below.split("refused by ").skip(1).filter_map(|group| group.trim().split_once(": "));
        let own: Vec<&str> =
            groups.filter(|(ids, _)| ids.split(", ").any(|id| entry["id"] == id)).map(|(_, of_them)| of_them).collect();
        assert_eq!(own, [options.join(", ")], "{entry} {below}");
    }
}
