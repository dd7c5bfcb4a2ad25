//! [`Stages`]: another mixture for each part of a run.

use super::{Objective, ObjectiveConfig};
use crate::error::ModelError;

/// The objectives of a run, in order.
#[derive(Clone, Debug)]
pub struct Stages {
    /// Share of the run at which each one ends.
    parts: Vec<(f64, Objective)>,
    last: Objective,
}

impl Stages {
    /// Checks the settings of every stage.
    ///
    /// # Errors
    /// [`ModelError::Setting`] naming the key.
    pub fn new(config: &ObjectiveConfig) -> Result<Self, ModelError> {
        let mut begin = 0.0;
        let mut parts = Vec::new();
        for stage in &config.stages {
            if !(stage.until > begin && stage.until < 1.0) {
                return Err(ModelError::setting(
                    format!(
                        "`objective.stages` has `until = {}`, expected increasing shares of the run between 0 and 1",
                        stage.until
                    ),
                    "after the last stage `objective.losses` holds",
                ));
            }
            begin = stage.until;
            let part = ObjectiveConfig {
                losses: stage.losses.clone(),
                slot_weight: stage.slot_weight.unwrap_or(config.slot_weight),
                stages: Vec::new(),
                ..config.clone()
            };
            parts.push((stage.until, Objective::new(&part)?));
        }
        Ok(Self {
            parts,
            last: Objective::new(config)?,
        })
    }

    /// The objective of `step` (from 0) of `total`.
    pub fn at(&self, step: u64, total: u64) -> &Objective {
        let share = step as f64 / total.max(1) as f64;
        let part = self.parts.iter().find(|(until, _)| share < *until);
        part.map_or(&self.last, |(_, objective)| objective)
    }

    /// All objectives, in order.
    pub fn all(&self) -> impl Iterator<Item = &Objective> {
        let parts = self.parts.iter().map(|(_, objective)| objective);
        parts.chain(std::iter::once(&self.last))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::config::Stage;
    use super::*;

    fn config(untils: &[f64]) -> ObjectiveConfig {
        let stage = |&until: &f64| Stage {
            until,
            losses: BTreeMap::from([("tv".to_owned(), until)]),
            slot_weight: None,
        };
        ObjectiveConfig {
            stages: untils.iter().map(stage).collect(),
            ..ObjectiveConfig::default()
        }
    }

    #[test]
    fn each_part_of_the_run_has_its_losses() {
        let stages = Stages::new(&config(&[0.25, 0.5])).expect("valid stages");
        let names = |step| stages.at(step, 8).config().losses.clone();
        let tv = |x: f64| BTreeMap::from([("tv".to_owned(), x)]);
        assert_eq!([names(0), names(1)], [tv(0.25), tv(0.25)]);
        assert_eq!([names(2), names(3)], [tv(0.5), tv(0.5)]);
        assert_eq!(names(4), BTreeMap::from([("kl".to_owned(), 1.0)]));
        assert_eq!(names(7), names(4));
        assert_eq!(stages.all().count(), 3);
    }

    #[test]
    fn shares_that_do_not_increase_are_refused() {
        for untils in [&[0.5, 0.5][..], &[0.6, 0.2], &[0.0], &[1.0], &[f64::NAN]] {
            let message = Stages::new(&config(untils))
                .expect_err("refused")
                .to_string();
            assert!(
                message.starts_with("`objective.stages` has `until = "),
                "{message}"
            );
        }
    }
}
