//! [`TargetModel::forward_alone`]: passes whose results depend on nothing but the text before a token.

use burn::tensor::Tensor;

use crate::batch::{StateSpec, TargetStates};
use crate::target::{KvCache, TargetModel};

impl TargetModel {
    /// As [`TargetModel::forward_cached`], but bit for bit the same whatever else is computed: a matrix product
    /// may round a row otherwise when it has other rows beside it, so each row runs by itself, and each token
    /// behind the first pass of its row too. States behind the end of a row are zeros.
    pub fn forward_alone(
        &self,
        rows: &[&[u32]],
        want: &StateSpec,
        cache: &mut KvCache,
    ) -> TargetStates {
        let longest = rows.iter().map(|row| row.len()).max().unwrap_or(0);
        let mut states = Vec::with_capacity(rows.len());
        for (index, row) in rows.iter().enumerate() {
            let mut own = cache.row(index);
            let pass_len = if own.lens() == [0] { row.len() } else { 1 };
            let passes = row
                .chunks(pass_len.max(1))
                .map(|tokens| self.forward_cached(&[tokens], want, &mut own));
            states.push(joined(passes.collect(), longest));
            cache.set_row(index, own);
        }
        let (aux, hidden) = states.into_iter().unzip();
        TargetStates {
            aux: Tensor::cat(aux, 0),
            final_hidden: Tensor::cat(hidden, 0),
            teacher: None,
        }
    }
}

/// States `[1, S, ..]` of passes one behind the other, padded to `len`.
fn joined(passes: Vec<TargetStates>, len: usize) -> (Tensor<3>, Tensor<3>) {
    let padded = |parts: Vec<Tensor<3>>| {
        let whole = Tensor::cat(parts, 1);
        let missing = len - whole.dims()[1];
        whole.pad((0, 0, 0, missing), 0.0)
    };
    let parts = passes.into_iter().map(|pass| (pass.aux, pass.final_hidden));
    let (aux, hidden) = parts.unzip();
    (padded(aux), padded(hidden))
}
