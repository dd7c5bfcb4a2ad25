//! The terms of a mixture: losses of single slots, and objectives that couple slots.

use super::SlotScores;
use super::config::SlotWeight;
use super::coupled::{self, Coupled};
use crate::loss::{self, CrossEntropy, DraftLoss, Tv};
use crate::slot::Slot;

/// One term of a mixture.
#[derive(Clone, Copy, Debug)]
pub(super) enum Term {
    /// A loss of each slot for itself.
    Single(&'static dyn DraftLoss),
    /// The expected accepted length of a round.
    ExpectedLength,
    /// The expected number of rounds of a turn.
    RoundCount,
}

/// A term with its coefficients for the slots of a batch.
#[derive(Clone, Debug)]
pub(super) struct SlotTerm {
    /// Name in run files.
    pub(super) name: &'static str,
    /// The loss whose closed form is taken.
    pub(super) loss: &'static dyn DraftLoss,
    /// Coefficient in the mixture.
    pub(super) coefficient: f64,
    /// Further factor of each slot's gradient; 1 where absent.
    pub(super) factor: Option<Vec<f32>>,
    /// The value of each slot where it is not that of `loss`.
    pub(super) value: Option<Vec<f32>>,
}

impl Term {
    /// The term of that name.
    pub(super) fn find(name: &str) -> Option<Self> {
        match name {
            "expected_length" => Some(Self::ExpectedLength),
            "round_count" => Some(Self::RoundCount),
            name => loss::find(name).map(Self::Single),
        }
    }

    /// Names of all terms.
    pub(super) fn names() -> Vec<&'static str> {
        let mut names = loss::names();
        names.extend([Self::ExpectedLength.name(), Self::RoundCount.name()]);
        names
    }

    /// Name in run files.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Single(loss) => loss.name(),
            Self::ExpectedLength => "expected_length",
            Self::RoundCount => "round_count",
        }
    }

    /// Whether its coefficients come from a first pass.
    pub(super) fn is_coupled(self) -> bool {
        !matches!(self, Self::Single(_))
    }

    /// The term for the slots of a batch; `scores` are those of the first pass, where one is needed.
    pub(super) fn for_slots(
        self,
        coefficient: f64,
        slots: &[Slot],
        scores: &SlotScores,
        weight: SlotWeight,
        dpace: Option<&[f32]>,
    ) -> SlotTerm {
        let (loss, coupled): (&'static dyn DraftLoss, Option<Coupled>) = match self {
            Self::Single(loss) => (loss, None),
            Self::ExpectedLength => {
                let at = |depth| weight.at(depth);
                (&Tv, Some(coupled::expected_length(slots, scores, at)))
            }
            Self::RoundCount => (
                &CrossEntropy::DataToken,
                Some(coupled::round_count(slots, scores)),
            ),
        };
        let Some(coupled) = coupled else {
            return SlotTerm {
                name: self.name(),
                loss,
                coefficient,
                factor: dpace.map(<[f32]>::to_vec),
                value: None,
            };
        };
        // The slot's own weight is applied to every gradient; a coupled factor holds all weights already.
        let unweighted =
            |(slot, factor): (&Slot, &f32)| (f64::from(*factor) / weight.at(slot.depth)) as f32;
        SlotTerm {
            name: self.name(),
            loss,
            coefficient,
            factor: Some(slots.iter().zip(&coupled.factor).map(unweighted).collect()),
            value: Some(coupled.value),
        }
    }
}

impl SlotTerm {
    /// Factor of the gradient of slot `index`, coefficient included.
    pub(super) fn factor(&self, index: usize) -> f32 {
        self.coefficient as f32 * self.own_factor(index)
    }

    /// The term at slot `index` before its coefficient, given the value of `loss` there.
    pub(super) fn value(&self, index: usize, value: f32) -> f32 {
        match &self.value {
            Some(values) => values[index],
            None => self.own_factor(index) * value,
        }
    }

    fn own_factor(&self, index: usize) -> f32 {
        self.factor.as_ref().map_or(1.0, |factors| factors[index])
    }
}
