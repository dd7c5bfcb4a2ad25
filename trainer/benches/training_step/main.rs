//! A training step of each kind of drafter at the shapes of SmolLM2-135M, beside eager PyTorch.
//!
//! ```text
//! cargo bench --workspace --bench training_step                      both families, ours alone
//! PYTHON=python3 cargo bench --workspace --bench training_step       beside eager.py, run by that Python (torch 2.13.0)
//! cargo bench --workspace --bench training_step -- eagle3 6          one family, six timed steps, time by phase
//! cargo bench --workspace --bench training_step -- eagle3 6 trained  a head of its own instead of the target's rows
//! cargo bench --workspace --bench training_step -- dflash 6 whole-teacher
//! ```
//!
//! The states are random; they bring the teacher's figures, as captured ones do. With `whole-teacher` they do not, as
//! those of a target that runs beside the training, and each step computes the teacher over the whole vocabulary.
//! Every family runs in a process of its own, so that its peak of resident memory is its own.
#![expect(clippy::print_stdout, reason = "a benchmark prints its figures")]
#![expect(
    clippy::expect_used,
    reason = "a benchmark with constant inputs has nobody to report errors to"
)]

mod case;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use draftsmith_trainer::step::Phases;

/// The allocator of the program.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const FAMILIES: [&str; 2] = ["eagle3", "dflash"];
const STEPS: usize = 6;

fn main() {
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| arg != "--bench") // given by cargo
        .collect();
    match args.split_first() {
        Some((family, rest)) if FAMILIES.contains(&family.as_str()) => one_family(family, rest),
        Some((word, _)) => println!("`{word}` is no family of this benchmark: {FAMILIES:?}"),
        None => all_families(),
    }
}

/// Times one family in this process.
fn one_family(family: &str, args: &[String]) {
    let steps = args.iter().find_map(|arg| arg.parse().ok());
    let case = case::Case::new(family, |word| args.iter().any(|arg| arg == word));
    println!("peak memory before the first step: {} MB", peak_megabytes());
    print(&case.time(steps.unwrap_or(STEPS)), case::tokens());
}

/// Times every family in a process of its own, and PyTorch after each.
fn all_families() {
    let python = std::env::var("PYTHON").ok();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/training_step/eager.py");
    let steps = STEPS.to_string();
    for family in FAMILIES {
        println!("\n{family}: ours");
        let this = std::env::current_exe().expect("the path of this program");
        let ours = figures(Command::new(this).args([family, &steps]));
        let Some(python) = &python else { continue };
        println!("\n{family}: eager PyTorch in f32");
        let eager = figures(Command::new(python).arg(&script).args([family, &steps]));
        println!(
            "\n{family}: PyTorch's time / ours {:.2}, our peak memory / PyTorch's {:.2}",
            eager.milliseconds / ours.milliseconds,
            ours.megabytes / eager.megabytes
        );
    }
}

struct Figures {
    milliseconds: f64,
    megabytes: f64,
}

/// Runs a program that ends with `step X ms` and `peak memory: Y MB`.
fn figures(command: &mut Command) -> Figures {
    let output = command.output().expect("the program starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    print!("{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?} failed");
    let after = |key: &str| {
        let line = text
            .lines()
            .rev()
            .find_map(|line| line.trim().strip_prefix(key));
        let number = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        number.expect("the program prints its figures")
    };
    Figures {
        milliseconds: after("step "),
        megabytes: after("peak memory: "),
    }
}

/// How to take one phase out of the times of a step.
type Part = fn(&Phases) -> Duration;

/// Medians of each phase.
fn print(phases: &[Phases], tokens: usize) {
    let mut total = 0.0;
    let parts: [(&str, Part); 5] = [
        ("states", |p| p.states),
        ("draft_slots forward", |p| p.forward),
        ("objective", |p| p.objective),
        ("backward", |p| p.backward),
        ("clip + optimizer", |p| p.update),
    ];
    for (name, part) in parts {
        let mut times: Vec<f64> = phases.iter().map(|p| part(p).as_secs_f64() * 1e3).collect();
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        total += median;
        println!("{name:>20} {median:9.1} ms");
    }
    let speed = tokens as f64 / total * 1e3;
    println!("{:>20} {total:9.1} ms, {speed:.0} tokens/s", "step");
    println!("peak memory: {} MB", peak_megabytes());
}

/// Peak of the resident memory of this process; 0 where the system does not tell.
fn peak_megabytes() -> u64 {
    let status = fs_err::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kilobytes.unwrap_or(0) / 1024
}
