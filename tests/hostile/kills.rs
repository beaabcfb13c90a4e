//! Signals at random moments: nothing is left, and a training run goes on to the same bits.

use std::env;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;

use super::entries::{train_settings, words};
use super::sandbox::{Content, Fault, Finding, Sandbox, kill, raw_character};

/// The seed of the moments.
const SEED: u64 = 240;

const SIGNALS: [&str; 4] = ["INT", "TERM", "HUP", "KILL"];

/// A command that takes a while.
struct Long {
    name: &'static str,
    args: String,
    files: Vec<(String, Content)>,
    outputs: &'static [&'static str],
    /// Whether the command ends by itself.
    ends: bool,
    /// The time that it took when nobody disturbed it; half a second of one that does not end.
    took: Duration,
    /// The checkpoint and the journal that an undisturbed training run leaves.
    bits: Option<(Vec<u8>, Vec<Value>)>,
}

const KERNEL: &str = r#"
trap '' INT TERM HUP
say() { printf '%s\n' "$1"; }
say '{"protocol": "assay-check/1", "dtypes": ["f32", "bf16"], "outputs": []}'
while read -r line; do
  id=${line#*'"id":'}; id=${id%%,*}
  [ "$id" -lt 20 ] || while :; do sleep 1; done
  say "{\"id\":$id, \"error\": \"none\"}"
done
"#;

static COMMANDS: LazyLock<Vec<Long>> = LazyLock::new(|| {
    let mut train = train_settings();
    train["steps"] = 8.into();
    let files = |name: &str, text: String| vec![(name.into(), Content::of(text))];
    let long = |name, args: &str, files, outputs, ends| Long {
        name,
        args: args.into(),
        files,
        outputs,
        ends,
        took: Duration::from_millis(500),
        bits: None,
    };
    let check = "check --cases 40 --wide 0 --no-power --no-shrink --json new.json --html new.html";
    let mut all = vec![
        long(
            "train",
            "train --config train.yaml --json new.json",
            files("train.yaml", train.to_string()),
            &["out", "new.json"],
            true,
        ),
        long(
            "check of a hung kernel",
            &format!("{check} --exec"),
            files("kernel.sh", KERNEL.into()),
            &["new.json", "new.html"],
            false,
        ),
        long("check --impl", &format!("{check} --impl native"), Vec::new(), &["new.json", "new.html"], true),
        long("suite", "suite --cases 60 --wide 1 -o new", Vec::new(), &["new"], true),
    ];
    // Another build may know no ranks.
    if env::var_os("ASSAY_UNDER_TEST").is_none() {
        all.push(long(
            "check of hung ranks",
            &format!("{check} --ranks 2 --cut vocabulary --exec"),
            files("kernel.sh", KERNEL.into()),
            &["new.json", "new.html"],
            false,
        ));
    }
    // A compiler in a process of its own, where one is installed for the command that is built here.
    let compiler = Path::new(env!("CARGO_MANIFEST_DIR")).join(".plugins/libtpu.so");
    if compiler.exists() && env::var_os("ASSAY_UNDER_TEST").is_none() {
        let args = "compile --target v6e --shape 1x8x256 --json new.json";
        all.push(long("compile", args, Vec::new(), &["new.json"], true));
    }
    for long in all.iter_mut().filter(|long| long.ends) {
        let sandbox = Sandbox::new(&long.files);
        let begun = Instant::now();
        let ran = sandbox.wait(sandbox.start(&long.words(), &[]));
        assert!(ran.status.is_some_and(|status| status.success()), "{}: {}", long.args, ran.text());
        (long.took, long.bits) = (begun.elapsed(), Long::bits_in(&sandbox));
    }
    all
});

impl Long {
    fn words(&self) -> Vec<String> {
        let kernel = (!self.ends).then(|| "sh kernel.sh".to_string());
        words(&self.args).into_iter().chain(kernel).collect()
    }

    fn outputs(&self) -> Vec<String> {
        self.outputs.iter().map(|name| (*name).into()).collect()
    }

    /// The checkpoint of a training run, and of its journal what no clock said.
    fn bits_in(sandbox: &Sandbox) -> Option<(Vec<u8>, Vec<Value>)> {
        let checkpoint = fs::read(sandbox.path("out/checkpoint.safetensors")).ok()?;
        let journal = fs::read_to_string(sandbox.path("out/metrics.jsonl")).ok()?;
        let timeless = |line: &str| {
            let mut line: Value = serde_json::from_str(line).ok()?;
            let of_clock = |name: &String| name == "unix_time" || name.ends_with("_s") || name.ends_with("_bytes");
            line.as_object_mut()?.retain(|name, _| !of_clock(name));
            Some(line)
        };
        Some((checkpoint, journal.lines().map(timeless).collect::<Option<_>>()?))
    }

    /// Starts the command and ends it by `signal` after `share` of the time that it takes.
    fn killed(&self, signal: &str, share: f64) -> Vec<Finding> {
        let sandbox = Sandbox::new(&self.files);
        let child = sandbox.start(&self.words(), &[]);
        thread::sleep(self.took.mul_f64(share));
        kill(signal, &child.id().to_string());
        let ran = sandbox.wait(child);
        let mut findings = Vec::new();
        let mut found = |fault, what: String| findings.push(Finding { fault, what });
        if ran.status.is_none() {
            found(Fault::Leftover, "does not end".into());
        }
        if String::from_utf8_lossy(&ran.stderr).contains("panicked at") {
            found(Fault::Panic, ran.text());
        }
        if let Some(c) = raw_character(&ran.stdout).or_else(|| raw_character(&ran.stderr)) {
            found(Fault::Escape, format!("prints {}", c.escape_unicode()));
        }
        // Processes and shared memory go at once. Where the signal ended the command, a file next to an output stays until the same command
        // is run again, which removes it.
        let was_ended = ran.status.is_some_and(|status| status.signal().is_some());
        let now = sandbox.left(&self.outputs()).into_iter();
        findings.extend(now.filter(|finding| !(was_ended && finding.what.starts_with("file "))));
        if self.ends {
            let again = sandbox.wait(sandbox.start(&self.words(), &[]));
            if !again.status.is_some_and(|status| status.success()) {
                findings.push(Finding { fault: Fault::Message, what: format!("does not go on: {}", again.text()) });
            } else if self.bits.is_some() && Self::bits_in(&sandbox) != self.bits {
                findings.push(Finding { fault: Fault::Leftover, what: "goes on to other bits".into() });
            }
            findings.extend(sandbox.left(&self.outputs()));
        }
        findings
    }
}

/// The kill with number `i`: what was killed, and the faults.
pub(super) fn kill_number(i: u64) -> (String, Vec<Finding>) {
    let mut rng = ChaCha8Rng::seed_from_u64(SEED.wrapping_mul(1 << 32) + i);
    let commands = &*COMMANDS;
    let at = usize::try_from(i).unwrap();
    let (long, signal) = (&commands[at % commands.len()], SIGNALS[at / commands.len() % SIGNALS.len()]);
    let share = rng.random_range(0.0..1.0);
    (format!("kill {i}: {signal} of {} after {share:.2} of its time", long.name), long.killed(signal, share))
}
