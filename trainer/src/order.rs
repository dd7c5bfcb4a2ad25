//! The order of the training rows: a pure function of (seed, epoch), never of what ran before.
//!
//! The rows of an epoch are permuted and dealt to optimizer steps in that order, so that a step sees
//! rows of every length and kind. Only inside a step are they sorted by length and cut into
//! micro-batches with little padding. The last step of an epoch may hold fewer tokens than the others.

use draftsmith_models::rng::{Purpose, Stream};

use crate::config::TrainConfig;

/// What a further micro-batch costs beside its tokens, as a share of `batch_tokens`: below it, padding
/// is cheaper than a pass of its own.
const PASS_SHARE: usize = 16;

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
        self.steps(&stream.permutation(self.lens.len()))
            .into_iter()
            .map(|rows| self.micro_batches(rows))
            .collect()
    }

    /// Cuts a permutation into runs of rows that together hold at most the tokens of one step.
    fn steps(&self, permuted: &[usize]) -> Vec<Vec<usize>> {
        let limit = self.accumulate * self.batch_tokens;
        let mut steps: Vec<Vec<usize>> = Vec::new();
        let mut tokens = limit;
        for &row in permuted {
            tokens += self.lens[row];
            if let Some(step) = steps.last_mut().filter(|_| tokens <= limit) {
                step.push(row);
            } else {
                steps.push(vec![row]);
                tokens = self.lens[row];
            }
        }
        steps
    }

    /// The cheapest cut of the rows of a step: runs of similar length, each at most `batch_tokens`
    /// with its padding.
    fn micro_batches(&self, mut rows: Vec<usize>) -> Vec<MicroBatch> {
        rows.sort_by_key(|&row| self.lens[row]); // stable: ties keep the permuted order
        let pass = self.batch_tokens / PASS_SHARE;
        // cheapest[n]: (cost of the first n rows, where their last micro-batch starts)
        let mut cheapest = vec![(0, 0)];
        for end in 1..=rows.len() {
            let longest = self.lens[rows[end - 1]];
            let cost = |start: usize| (end - start) * longest;
            let best = (0..end)
                .filter(|&start| end - start == 1 || cost(start) <= self.batch_tokens)
                .map(|start| (cheapest[start].0 + cost(start) + pass, start))
                .min();
            cheapest.extend(best);
        }
        let mut batches = Vec::new();
        while !rows.is_empty() {
            batches.push(rows.split_off(cheapest[rows.len()].1));
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
        // Steps of about 21 rows of 1 to 97 tokens, cut in about seven.
        assert!(
            (padded as f64) < 1.15 * real as f64,
            "{padded} padded, {real} real"
        );
    }

    // Seen red: sorting the whole permutation by length in `epoch`, before it is dealt to steps.
    #[test]
    fn steps_hold_rows_of_every_length() {
        let lens: Vec<usize> = (0..1000).map(|i| if i < 500 { 10 } else { 40 }).collect();
        let order = DataOrder::new(lens.clone(), &train(3, 200, 4, 1));
        let steps = order.epoch(0);
        for step in &steps[..steps.len() - 1] {
            let rows: Vec<usize> = step.iter().flatten().copied().collect();
            let tokens: usize = rows.iter().map(|&row| lens[row]).sum();
            assert!(tokens > 800 - 40 && tokens <= 800, "{tokens} tokens");
            // 32 rows on average: all of one length has a chance of 2^-31.
            assert!(rows.iter().any(|&row| row < 500) && rows.iter().any(|&row| row >= 500));
        }
    }

    #[test]
    fn micro_batches_are_the_cheapest_cut() {
        let order = DataOrder::new(vec![9, 1, 1, 9, 30], &train(0, 32, 9, 1));
        let cut = |rows: &[usize]| {
            let mut batches = order.micro_batches(rows.to_vec());
            batches.sort();
            batches
        };
        // A pass costs two tokens: rows of one and nine are apart, equal ones are together.
        assert_eq!(cut(&[0, 1, 2, 3, 4]), [vec![0, 3], vec![1, 2], vec![4]]);
        let order = DataOrder::new(vec![9, 8], &train(0, 32, 9, 1));
        assert_eq!(order.micro_batches(vec![0, 1]), [[1, 0]]);
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
