//! Gradients of one micro-batch by parameter name, and how two devices differ in them.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use draftsmith_data::hidden::HiddenStateSource;
use draftsmith_models::drafter::AnchorDraw;
use draftsmith_models::weights::host_values;

use crate::error::TrainerError;
use crate::parts::RowStore;
use crate::step::Learner;

/// Loss and gradients of one micro-batch.
#[derive(Clone, Debug)]
pub struct NamedGradients {
    /// The normalised loss; 0 without a slot.
    pub loss: f64,
    /// Gradient of each trained parameter, flat, by name.
    pub tensors: Vec<(String, Vec<f32>)>,
}

/// How the gradient of one parameter differs between two devices.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct TensorDifference {
    /// Name of the parameter.
    pub name: String,
    /// Largest absolute difference over the reference's largest absolute value.
    pub max_relative: f64,
    /// Norm over the reference's norm.
    pub norm_ratio: f64,
}

/// How far the norm of a gradient may be from the reference's, as a ratio.
const NORM_RATIO: std::ops::RangeInclusive<f64> = 0.98..=1.02;

impl TensorDifference {
    /// Whether the gradient is the reference's: every value within `tolerance` of the largest, the norm within two
    /// percent, and zero exactly where the reference is. A value that is not a number never agrees.
    pub fn agrees(&self, tolerance: f64) -> bool {
        // Against a reference of zero both figures are absolute; a gradient lost on the way has 1 and 0.
        let is_zero = self.norm_ratio <= tolerance;
        self.max_relative <= tolerance && (is_zero || NORM_RATIO.contains(&self.norm_ratio))
    }
}

impl Learner<'_> {
    /// Loss and gradients of the rows at `indices`, without an update.
    ///
    /// # Errors
    /// [`TrainerError::Part`] when the states cannot be had.
    pub fn named_gradients(
        &self,
        indices: &[usize],
        rows: &dyn RowStore,
        source: &dyn HiddenStateSource,
    ) -> Result<NamedGradients, TrainerError> {
        let draw = AnchorDraw { seed: 0, step: 0 };
        let (gradients, report) = self.gradients(indices, rows, source, draw)?;
        let mut collector = Collector {
            gradients: &gradients,
            path: Vec::new(),
            tensors: Vec::new(),
        };
        self.drafter.visit(&mut collector);
        Ok(NamedGradients {
            loss: report.loss.unwrap_or(0.0),
            tensors: collector.tensors,
        })
    }
}

/// Differences of all tensors of either side; one that `other` lacks has ratio 0, one that only `other` has is
/// infinitely far.
pub fn differences(reference: &NamedGradients, other: &NamedGradients) -> Vec<TensorDifference> {
    let of = |gradients: &NamedGradients, name: &str| {
        let found = gradients.tensors.iter().find(|(other, _)| other == name);
        found.map(|(_, values)| values.clone())
    };
    let known = reference.tensors.iter().map(|(name, expected)| {
        let found = of(other, name).unwrap_or_default();
        difference(name, expected, &found)
    });
    let unknown = other
        .tensors
        .iter()
        .filter(|(name, _)| of(reference, name).is_none());
    let unknown = unknown.map(|(name, _)| TensorDifference {
        name: name.clone(),
        max_relative: f64::INFINITY,
        norm_ratio: f64::INFINITY,
    });
    known.chain(unknown).collect()
}

fn difference(name: &str, expected: &[f32], found: &[f32]) -> TensorDifference {
    let at = |index: usize| f64::from(found.get(index).copied().unwrap_or(0.0));
    let pairs = || {
        expected
            .iter()
            .enumerate()
            .map(|(i, &e)| (f64::from(e), at(i)))
    };
    let norm = |square: fn((f64, f64)) -> f64| pairs().map(square).sum::<f64>().sqrt();
    TensorDifference {
        name: name.to_owned(),
        max_relative: relative_difference(expected, found),
        norm_ratio: ratio(norm(|(_, f)| f * f), norm(|(e, _)| e * e)),
    }
}

/// Largest absolute difference over the largest absolute value of `expected`; missing values count as
/// zero, and the result is not a number when any value is not.
pub fn relative_difference(expected: &[f32], found: &[f32]) -> f64 {
    // Not `f64::max`: it passes over a value that is not a number.
    let larger = |a: f64, b: f64| if a >= b || a.is_nan() { a } else { b };
    let (mut largest, mut furthest) = (0.0, 0.0);
    for (index, &value) in expected.iter().enumerate() {
        let other = found.get(index).copied().unwrap_or(0.0);
        largest = larger(largest, f64::from(value).abs());
        furthest = larger(furthest, (f64::from(value) - f64::from(other)).abs());
    }
    ratio(furthest, largest)
}

/// `a / b`; a tensor that is zero on both sides counts as equal.
fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { a }
}

struct Collector<'a> {
    gradients: &'a GradientsParams,
    path: Vec<String>,
    tensors: Vec<(String, Vec<f32>)>,
}

impl ModuleVisitor for Collector<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.get::<D>(param.id) {
            self.tensors
                .push((self.path.join("."), host_values(&gradient)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seen red with `f64::max` for `larger`.
    #[test]
    fn a_vanished_scaled_or_broken_gradient_is_seen() {
        let gradients = |values: &[f32]| NamedGradients {
            loss: 1.0,
            tensors: vec![("fc".to_owned(), values.to_vec())],
        };
        let reference = gradients(&[1.0, -2.0]);
        let same = &differences(&reference, &reference)[0];
        assert!(same.max_relative == 0.0 && (same.norm_ratio - 1.0).abs() < 1e-12);
        let scaled = &differences(&reference, &gradients(&[1.1, -2.2]))[0];
        // Exact arithmetic up to the rounding of 1.1 and 2.2 to f32.
        assert!((scaled.max_relative - 0.1).abs() < 1e-6);
        assert!((scaled.norm_ratio - 1.1).abs() < 1e-6);
        let broken = &differences(&reference, &gradients(&[f32::NAN, -2.0]))[0];
        assert!(broken.max_relative.is_nan(), "{broken:?}");
        let missing = NamedGradients {
            loss: 1.0,
            tensors: Vec::new(),
        };
        assert!(differences(&reference, &missing)[0].norm_ratio == 0.0);
    }
    /// Pitfall 56: the comparison of `doctor` sees what was lost on a device, tensor by tensor, and takes only zero for
    /// zero. Seen red with `!(self.max_relative > tolerance)` for `self.max_relative <= tolerance`, and with the norm
    /// left out of `agrees`.
    #[test]
    fn pitfall_56_lost_zero_and_broken_gradients_never_agree() {
        let gradients = |values: Option<&[f32]>| NamedGradients {
            loss: 1.0,
            tensors: values
                .map(|values| ("fc".to_owned(), values.to_vec()))
                .into_iter()
                .collect(),
        };
        let agrees = |expected: Option<&[f32]>, found: Option<&[f32]>| {
            let found = differences(&gradients(expected), &gradients(found));
            assert_eq!(found.len(), 1);
            found[0].agrees(1e-2)
        };
        let values = Some([1.0, -2.0, 0.5, 0.0].as_slice());
        assert!(agrees(values, values));
        assert!(agrees(values, Some(&[1.005, -2.0, 0.495, 0.001])));
        for broken in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(!agrees(values, Some(&[1.0, -2.0, 0.5, broken])), "{broken}");
            assert!(!agrees(values, Some(&[broken; 4])), "{broken}");
            assert!(!agrees(Some(&[0.0; 4]), Some(&[broken; 4])), "{broken}");
            assert!(!agrees(Some(&[1.0, -2.0, 0.5, broken]), values), "{broken}");
        }
        assert!(!agrees(values, Some(&[0.0; 4])), "exactly zero");
        assert!(!agrees(values, None), "no gradient at all");
        assert!(!agrees(None, values), "a gradient from nowhere");
        assert!(
            agrees(Some(&[0.0; 4]), Some(&[0.0; 4])),
            "zero on both sides"
        );
        assert!(!agrees(Some(&[0.0; 4]), values));
        // Many small values within the tolerance of one large one: only the norm shows that they are gone.
        let long: Vec<f32> = std::iter::once(1.0).chain([0.009; 1000]).collect();
        let cut: Vec<f32> = std::iter::once(1.0).chain([0.0; 1000]).collect();
        assert!(!agrees(Some(&long), Some(&cut)));
    }
}
