//! The learning rate as a plain function of the step number.

use std::f64::consts::PI;

use crate::config::{OptimizerConfig, Schedule};

/// Learning rate of step `step`, counted from 1, in a run of `total` steps.
///
/// It rises linearly over the warm-up, reaches its peak at the last warm-up step and, for `cosine` and
/// `linear`, falls to `final_fraction` of the peak exactly at step `total`.
pub fn learning_rate(config: &OptimizerConfig, step: u64, total: u64) -> f64 {
    let warmup = config.warmup(total);
    if step <= warmup {
        return config.learning_rate * step as f64 / warmup as f64;
    }
    let progress = (step - warmup) as f64 / total.saturating_sub(warmup).max(1) as f64;
    let share = match config.schedule {
        Schedule::Constant => return config.learning_rate,
        Schedule::Linear => 1.0 - progress.min(1.0),
        Schedule::Cosine => 0.5 * (1.0 + (PI * progress.min(1.0)).cos()),
    };
    config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * share)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(schedule: Schedule, warmup: u64, total: u64) -> Vec<f64> {
        let config = OptimizerConfig {
            learning_rate: 2.0,
            schedule,
            warmup_steps: Some(warmup),
            final_fraction: 0.1,
            ..OptimizerConfig::default()
        };
        (1..=total)
            .map(|step| learning_rate(&config, step, total))
            .collect()
    }

    #[test]
    fn warm_up_is_linear_and_ends_at_the_peak() {
        for schedule in [Schedule::Cosine, Schedule::Linear, Schedule::Constant] {
            let rates = rates(schedule, 4, 10);
            assert_eq!(rates[..4], [0.5, 1.0, 1.5, 2.0]);
        }
    }

    #[test]
    fn the_last_step_has_exactly_the_final_share() {
        // One rounding of cos(pi) = -1 in f64.
        for schedule in [Schedule::Cosine, Schedule::Linear] {
            assert!((rates(schedule, 2, 9)[8] - 0.2).abs() < 1e-15);
        }
        assert_eq!(
            rates(Schedule::Constant, 2, 9)[8].to_bits(),
            2.0_f64.to_bits()
        );
    }

    #[test]
    fn linear_is_straight_and_cosine_halfway_in_the_middle() {
        let linear = rates(Schedule::Linear, 0, 4);
        assert!((linear[1] - 1.1).abs() < 1e-15 && (linear[0] - 1.55).abs() < 1e-15);
        assert!((rates(Schedule::Cosine, 0, 4)[1] - 1.1).abs() < 1e-15);
    }

    #[test]
    fn a_run_that_is_all_warm_up_stays_finite() {
        assert!(
            rates(Schedule::Cosine, 10, 5)
                .iter()
                .all(|rate| rate.is_finite())
        );
    }
}
