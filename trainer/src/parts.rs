//! What a run is given by other crates: rows and a validator.

use draftsmith_data::dataset::Dataset;
use draftsmith_models::batch::TokenRow;
use draftsmith_models::drafter::AnyDrafter;

use crate::error::PartError;

/// The tokenised training rows, random access.
pub trait RowStore {
    /// Number of rows.
    fn len(&self) -> usize;

    /// The row at `index`, below [`RowStore::len`].
    fn row(&self, index: usize) -> TokenRow;

    /// Whether there is no row.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl RowStore for Vec<TokenRow> {
    fn len(&self) -> usize {
        self.len()
    }

    fn row(&self, index: usize) -> TokenRow {
        self[index].clone()
    }
}

/// Some rows of a prepared data set, in a fixed order.
#[derive(Clone, Copy, Debug)]
pub struct DatasetRows<'a> {
    /// The data set.
    pub dataset: &'a Dataset,
    /// Indices of its rows, each at most once; the training side of a split, for example.
    pub indices: &'a [usize],
}

impl RowStore for DatasetRows<'_> {
    fn len(&self) -> usize {
        self.indices.len()
    }

    fn row(&self, index: usize) -> TokenRow {
        self.dataset.row(self.indices[index])
    }
}

/// Measures a drafter during training.
pub trait Validator {
    /// Measures `drafter`, which has no gradient graph.
    ///
    /// # Errors
    /// [`PartError`] when the measurement fails; it ends the run.
    fn validate(&mut self, drafter: &AnyDrafter) -> Result<Validation, PartError>;
}

/// Figures of one validation.
#[derive(Clone, Debug, PartialEq)]
pub struct Validation {
    /// Named figures, for example `tau_gamma_5`.
    pub figures: Vec<(String, f64)>,
    /// The figure that selects the best checkpoint; higher is better.
    pub score: f64,
}
