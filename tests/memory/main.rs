//! What is taken and what is lost: memory of the whole process, so that one trial runs at a time and nothing beside it.

mod judge;
mod native;
#[cfg(feature = "pjrt")]
mod runtime;

use assay_testkit::slowest;
use libtest_mimic::{Arguments, Trial};

fn main() {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let trial = |name: &'static str, check: fn()| {
        Trial::test(name, move || {
            slowest::timed(name.into(), check);
            Ok(())
        })
    };
    let trials = vec![
        // First: it counts each byte, where the other reads a slope.
        trial("memory_of_a_kernel_is_a_megabyte_a_thread_or_a_chunk", native::extra_memory),
        trial("lm_head_judge_widens_a_few_columns_at_a_time", judge::of_a_head),
        #[cfg(feature = "pjrt")]
        trial("runtime_leaks_nothing_in_two_hundred_cycles", runtime::cycles_leak_nothing),
    ];
    let conclusion = libtest_mimic::run(&arguments, trials);
    slowest::print();
    conclusion.exit();
}
