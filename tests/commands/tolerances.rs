//! `assay tolerances`: the law shown, measured again, lowered, and raised for a reason only.

use std::fs;

use crate::common::command::{Output, assay, assert_refused};
use assay::judge::tolerance::{Tolerance, Tolerances};
use serde_json::Value;
use tempfile::TempDir;

const REASON: &str = "the vector unit sums in another order";

/// `worst_seen`, `kappa` and `measured_on`.
type Figures = (f64, f64, String);

/// Two entries that are measured and one that is not, laid out by hand.
fn text(logp: &Figures, loss: &Figures) -> String {
    format!(
        r#"# The law, in small.

[[tolerance]]   # logp comes first
output = "logp"
model = "elementwise"
dtype = "f32"
class = "native"
kappa = {:?}     # no more than is derived
derived = 3.0
worst_seen = {:?}
measured_on = "{}"
why = "Gap rounded thrice, exp within 1 ulp."  # see docs

[[tolerance]]
class = "native"
output = "loss"
model = "elementwise"
dtype = "f32"
derived = 11.0
measured_on   =   "{}"
worst_seen = {:?}
kappa = {:?}
why = "A weighted sum of token losses."

# Nobody measures this one here.
[[tolerance]]
output = "loss"
model = "elementwise"
dtype = "f32"
class = "external"
kappa = 4.0
derived = 4.0
worst_seen = 1.0
measured_on = "another machine altogether"
why = "A weighted sum of token losses."
# The end.
"#,
        logp.1, logp.0, logp.2, loss.2, loss.0, loss.1
    )
}

fn guess(worst_seen: f64, kappa: f64) -> Figures {
    (worst_seen, kappa, "a guess, not a measurement".into())
}

/// More than native needs of either.
fn loose() -> String {
    text(&guess(2.5, 3.0), &guess(2.75, 11.0))
}

/// Less than native needs of logp.
fn tight() -> String {
    text(&guess(1e-6, 4e-6), &guess(2.75, 11.0))
}

/// A tolerance file of its own.
struct Law {
    folder: TempDir,
}

impl Law {
    fn new(text: &str) -> Self {
        let law = Self { folder: TempDir::new().unwrap() };
        fs::write(law.path(), text).unwrap();
        law
    }

    fn path(&self) -> String {
        self.folder.path().join("law.toml").to_str().unwrap().into()
    }

    fn text(&self) -> String {
        fs::read_to_string(self.path()).unwrap()
    }

    fn figures(&self) -> [Figures; 2] {
        let law = Tolerances::parse(&self.text()).unwrap();
        let figures = |entry: &Tolerance| (entry.worst_seen, entry.kappa, entry.measured_on.clone());
        let all: Vec<Figures> = law.entries().map(figures).collect();
        [all[0].clone(), all[1].clone()]
    }

    fn measure(&self, args: &[&str]) -> Output {
        let fixed = ["tolerances", "--measure", "--class", "native", "--cases", "60", "--file"];
        assay(&[&fixed[..], &[&self.path()], args].concat())
    }
}

#[test]
fn measuring_lowers_the_measured_fields_and_leaves_every_other_byte() {
    let law = Law::new(&loose());
    let output = law.measure(&[]);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    assert!(output.stdout.contains("2 lowered, 0 unchanged"), "{}", output.stdout);
    assert!(output.stdout.contains("1 not measured"), "{}", output.stdout);

    let [logp, loss] = law.figures();
    assert_eq!(law.text(), text(&logp, &loss));
    for ((worst_seen, kappa, measured_on), derived) in [(&logp, 3.0), (&loss, 11.0)] {
        assert!((1e-3..2.5).contains(worst_seen), "{worst_seen}");
        assert_eq!(*kappa, (4.0 * worst_seen).min(derived));
        assert!(measured_on.starts_with("assay tolerances --measure: 60 cases, V = 1 to "), "{measured_on}");
    }
}

#[test]
fn measuring_again_changes_no_figure() {
    let law = Law::new(&loose());
    law.measure(&[]);
    let first = law.figures();
    let again = law.measure(&[]);
    assert_eq!(again.code, 0, "{}", again.stderr);
    assert!(again.stdout.contains("0 lowered, 2 unchanged"), "{}", again.stdout);
    let figures = |[logp, loss]: [Figures; 2]| [(logp.0, logp.1), (loss.0, loss.1)];
    assert_eq!(figures(law.figures()), figures(first));
}

#[test]
fn more_than_was_derived_is_refused_for_any_reason() {
    let law = Law::new(&tight().replace("derived = 3.0", "derived = 0.001"));
    let before = law.text();
    let output = law.measure(&["--accept", REASON]);
    assert_eq!(output.code, 1);
    let said = "more was needed than was derived: the implementation is wrong, or the derivation:\n  native logp f32";
    assert!(output.stderr.contains(said), "{}", output.stderr);
    assert_eq!(law.text(), before);
}

#[test]
fn a_figure_met_to_a_part_in_a_thousand_stands() {
    let measured = Law::new(&loose());
    measured.measure(&[]);
    let [logp, loss] = measured.figures();
    let shy = |(worst_seen, _, measured_on): Figures, derived: f64| {
        let worst_seen = worst_seen * 0.9995;
        (worst_seen, (4.0 * worst_seen).min(derived), measured_on)
    };
    let law = Law::new(&text(&shy(logp, 3.0), &shy(loss, 11.0)));
    let before = law.text();
    let output = law.measure(&[]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    assert!(output.stdout.contains("2 unchanged"), "{}", output.stdout);
    assert_eq!(law.text(), before);
}

#[test]
fn raising_is_refused_without_a_reason_and_the_file_left_alone() {
    let law = Law::new(&tight());
    let output = law.measure(&[]);
    assert_eq!(output.code, 1, "{}{}", output.stdout, output.stderr);
    for part in
        ["law.toml", "native logp f32", "worst_seen 0.000001 → ", "kappa 0.000004 → ", "--accept", "native on 1"]
    {
        assert!(output.stderr.contains(part), "`{part}` not in: {}", output.stderr);
    }
    assert!(!output.stderr.contains("native loss"), "only what is raised: {}", output.stderr);
    assert_eq!(law.text(), tight());
}

#[test]
fn a_limit_below_the_rule_is_raised_for_a_reason_only() {
    let measured = Law::new(&loose());
    measured.measure(&[]);
    let [logp, loss] = measured.figures();
    let law = Law::new(&text(&logp, &(loss.0, loss.0 * 2.0, loss.2)));
    let output = law.measure(&[]);
    assert_eq!(output.code, 1, "{}", output.stdout);
    assert!(output.stderr.contains("native loss f32"), "{}", output.stderr);
}

#[test]
fn a_reason_raises_is_recorded_and_holds_until_it_is_taken_out() {
    let law = Law::new(&tight());
    let output = law.measure(&["--accept", REASON]);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    let [logp, loss] = law.figures();
    assert!(logp.0 > 1e-3 && loss.0 < 2.75, "{logp:?} {loss:?}");
    let why = "exp within 1 ulp.\"  # see docs\n";
    let recorded = text(&logp, &loss).replace(why, &format!("{why}accepted = \"{REASON}\"\n"));
    assert_eq!(law.text(), recorded, "only what was raised has a reason");

    let shown = assay(&["tolerances", "--file", &law.path()]);
    assert_eq!(shown.code, 0, "{}", shown.stderr);
    assert!(shown.stdout.contains(&format!("accepted for native logp f32: {REASON}\n")), "{}", shown.stdout);

    let looser = recorded.replace(&format!("worst_seen = {:?}", logp.0), "worst_seen = 2.5");
    let held = Law::new(&looser);
    let output = held.measure(&[]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    assert!(output.stdout.contains("1 held by its reason"), "{}", output.stdout);
    assert!(held.text().contains("worst_seen = 2.5\n"), "{}", held.text());
}

#[test]
fn the_law_is_shown_with_every_entry() {
    let folder = TempDir::new().unwrap();
    let json = folder.path().join("law.json");
    let output = assay(&["tolerances", "--json", json.to_str().unwrap()]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    let listed: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    let listed = listed.as_array().unwrap();
    let law = Tolerances::builtin();
    assert_eq!(listed.len(), law.entries().count());
    for (entry, listed) in law.entries().zip(listed) {
        assert_eq!(listed["output"], entry.output.name());
        assert_eq!(listed["kappa"], entry.kappa);
        assert_eq!(listed["worst_seen"], entry.worst_seen);
        assert_eq!(listed["class"], entry.class.as_str());
        assert!(output.stdout.contains(&format!("] {}\n", entry.measured_on)), "{}", output.stdout);
    }
    for part in ["κ", "derived", "worst seen", "measured on", "row_sum", "external"] {
        assert!(output.stdout.contains(part), "`{part}` not in: {}", output.stdout);
    }
}

#[test]
fn bad_input_is_refused_and_the_file_left_alone() {
    let law = Law::new(&loose());
    let path = law.path();
    let measure = ["tolerances", "--measure", "--file", &path];
    assert_refused(&[&measure[..], &["--class", "cuda"]].concat(), &["--class", "`cuda`", "native"]);
    assert_refused(&["tolerances", "--measure", "--file", "nowhere.toml"], &["nowhere.toml", "cannot read"]);
    assert_refused(&["tolerances", "--file", "Cargo.toml"], &["Cargo.toml", "tolerances"]);
    for (args, part) in [
        (&["--cases", "0"][..], "1 or more"),
        (&["--cases", "many"], "1 or more"),
        (&["--cases", "1", "--accept", "because"], "four words"),
        (&["--cases", "1", "--accept", ""], "four words"),
    ] {
        let output = assay(&[&measure[..], args].concat());
        assert_eq!(output.code, 2, "{args:?}");
        assert!(output.stderr.contains(part), "`{part}` not in: {}", output.stderr);
    }
    assert_eq!(assay(&["tolerances", "--class", "native"]).code, 2, "--class is of --measure");
    assert_eq!(law.text(), loose());
}
