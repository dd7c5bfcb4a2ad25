//! The order of the training rows: a pure function of (seed, epoch), never of what ran before.
//!
//! The rows of an epoch are permuted; windows of the permutation are sorted by length and cut into
//! micro-batches of similar lengths; the micro-batches are shuffled and dealt to optimizer steps. The
//! last step of an epoch may hold fewer micro-batches than the others.

use draftsmith_models::rng::{Purpose, Stream};

use crate::config::TrainConfig;

/// Rows that are sorted by length together: large enough for little padding, small enough that
/// batches of one length do not follow from the whole data set.
const WINDOW_ROWS: usize = 512;

/// Row indices of one micro-batch.
pub type MicroBatch = Vec<usize>;

/// The deterministic order of all epochs.
#[derive(Clone, Debug)]
pub struct DataOrder {
    seed: u64,
    lens: Vec<usize>,
    batch_tokens: usize,
    accumulate: usize,
}

impl DataOrder {
    /// An order over rows of the given lengths, none of them above `batch_tokens`.
    pub fn new(lens: Vec<usize>, train: &TrainConfig) -> Self {
        Self {
            seed: train.seed,
            lens,
            batch_tokens: train.batch_tokens,
            accumulate: train.accumulate,
        }
    }

    /// The optimizer steps of an epoch (from 0), each a list of micro-batches.
    pub fn epoch(&self, epoch: u64) -> Vec<Vec<MicroBatch>> {
        let mut stream = Stream::new(self.seed, Purpose::DataOrder, epoch);
        let permuted = stream.permutation(self.lens.len());
        let mut batches: Vec<MicroBatch> = permuted
            .chunks(WINDOW_ROWS)
            .flat_map(|window| self.micro_batches(window))
            .collect();
        let shuffled: Vec<MicroBatch> = stream
            .permutation(batches.len())
            .into_iter()
            .map(|index| std::mem::take(&mut batches[index]))
            .collect();
        shuffled
            .chunks(self.accumulate)
            .map(<[MicroBatch]>::to_vec)
            .collect()
    }

    fn micro_batches(&self, window: &[usize]) -> Vec<MicroBatch> {
        let mut sorted = window.to_vec();
        sorted.sort_by_key(|&row| self.lens[row]); // stable: ties keep the permuted order
        let mut batches: Vec<MicroBatch> = Vec::new();
        for row in sorted {
            // Ascending lengths: the row added last is the longest, so it sets the padded length.
            let fits = |batch: &MicroBatch| (batch.len() + 1) * self.lens[row] <= self.batch_tokens;
            match batches.last_mut().filter(|batch| fits(batch)) {
                Some(batch) => batch.push(row),
                None => batches.push(vec![row]),
            }
        }
        batches
    }

    /// Length of a run, from the same code that orders it.
    pub fn plan(&self, train: &TrainConfig) -> Plan {
        let limit = train.max_steps.unwrap_or(u64::MAX);
        let mut plan = Plan {
            rows: self.lens.len(),
            tokens_per_epoch: self.lens.iter().map(|&len| len as u64).sum(),
            padded_tokens: 0,
            steps_per_epoch: Vec::new(),
            steps: 0,
        };
        for epoch in 0..train.epochs {
            if plan.steps == limit {
                break;
            }
            let steps = self.epoch(epoch);
            let taken = (steps.len() as u64).min(limit - plan.steps);
            plan.padded_tokens += steps[..taken as usize]
                .iter()
                .flatten()
                .map(|batch| self.padded_tokens(batch))
                .sum::<u64>();
            plan.steps_per_epoch.push(taken);
            plan.steps += taken;
        }
        plan
    }

    fn padded_tokens(&self, batch: &MicroBatch) -> u64 {
        let longest = batch.iter().map(|&row| self.lens[row]).max().unwrap_or(0);
        (batch.len() * longest) as u64
    }
}

/// Length of a run, known before its first step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Training rows.
    pub rows: usize,
    /// Tokens of one pass over the data.
    pub tokens_per_epoch: u64,
    /// Tokens the run computes on, padding included.
    pub padded_tokens: u64,
    /// Optimizer steps taken in each epoch; the last one may be cut short by `train.max_steps`.
    pub steps_per_epoch: Vec<u64>,
    /// Optimizer steps of the whole run.
    pub steps: u64,
}

/// Where in the data a run stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Pass over the data, from 0.
    pub epoch: u64,
    /// Optimizer steps already taken in it.
    pub step_in_epoch: u64,
}

impl Plan {
    /// Position of the next step after `completed` steps; the end of the last epoch when none is left.
    pub fn position(&self, completed: u64) -> Position {
        let mut left = completed;
        for (epoch, &steps) in self.steps_per_epoch.iter().enumerate() {
            if left < steps {
                return Position {
                    epoch: epoch as u64,
                    step_in_epoch: left,
                };
            }
            left -= steps;
        }
        Position {
            epoch: self.steps_per_epoch.len() as u64,
            step_in_epoch: left,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn train(seed: u64, batch_tokens: usize, accumulate: usize, epochs: u64) -> TrainConfig {
        TrainConfig {
            epochs,
            batch_tokens,
            accumulate,
            seed,
            ..TrainConfig::default()
        }
    }

    fn flat(order: &DataOrder, epoch: u64) -> Vec<usize> {
        order.epoch(epoch).into_iter().flatten().flatten().collect()
    }

    // Seen red: `Stream::new(self.seed, .., 0)` in `epoch` (every epoch alike), and
    // `Stream::new(epoch, ..)` (the seed without effect).
    #[test]
    fn pitfall_51_orders_differ_by_epoch_and_seed_and_hold_each_row_once() {
        let orders: Vec<DataOrder> = [1, 2]
            .map(|seed| DataOrder::new(vec![4; 10], &train(seed, 4, 1, 3)))
            .into();
        let mut seen = Vec::new();
        for order in &orders {
            for epoch in 0..3 {
                let rows = flat(order, epoch);
                let mut sorted = rows.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..10).collect::<Vec<_>>());
                assert!(!seen.contains(&rows), "{rows:?} stood before");
                assert_eq!(rows, flat(order, epoch), "an order depends on nothing else");
                seen.push(rows);
            }
        }
    }

    #[test]
    fn micro_batches_respect_the_padded_limit_and_hold_each_row_once() {
        let lens: Vec<usize> = (0..1500).map(|i| 1 + (i * 37) % 97).collect();
        let order = DataOrder::new(lens.clone(), &train(3, 256, 4, 1));
        let steps = order.epoch(0);
        for batch in steps.iter().flatten() {
            assert!(order.padded_tokens(batch) <= 256 && !batch.is_empty());
        }
        let mut rows = flat(&order, 0);
        rows.sort_unstable();
        assert_eq!(rows, (0..1500).collect::<Vec<_>>());
        let padded: u64 = steps.iter().flatten().map(|b| order.padded_tokens(b)).sum();
        let real: usize = lens.iter().sum();
        // Windows of 512 rows of up to 97 tokens: sorting must keep the padding below a tenth.
        assert!(
            (padded as f64) < 1.1 * real as f64,
            "{padded} padded, {real} real"
        );
    }

    #[test]
    fn the_plan_counts_the_steps_that_are_taken() {
        let config = train(0, 4, 4, 2);
        let order = DataOrder::new(vec![4; 10], &config);
        let plan = order.plan(&config);
        assert_eq!((plan.steps, plan.steps_per_epoch.clone()), (6, vec![3, 3]));
        assert_eq!(plan.padded_tokens, 80);
        let cut = TrainConfig {
            max_steps: Some(4),
            ..config
        };
        assert_eq!(order.plan(&cut).steps_per_epoch, [3, 1]);
    }

    // Seen red: `if left <= steps` in `Plan::position` (the first step of epoch 2 is run in epoch 1).
    #[test]
    fn the_position_after_an_epoch_is_the_start_of_the_next() {
        let config = train(0, 4, 4, 3);
        let plan = DataOrder::new(vec![4; 10], &config).plan(&config);
        let at = |completed| {
            let position = plan.position(completed);
            (position.epoch, position.step_in_epoch)
        };
        assert_eq!(
            [at(0), at(2), at(3), at(8), at(9)],
            [(0, 0), (0, 2), (1, 0), (2, 2), (3, 0)]
        );
    }
}
