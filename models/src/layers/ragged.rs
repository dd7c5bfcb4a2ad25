//! [`Ragged`]: lists of different length, flat for work on each entry, padded for work across entries.

use burn::tensor::Tensor;

use crate::batch::index_tensor;

/// B lists; flat they are `[1, N, X]` with N entries in all, padded `[B, L, X]` with L the longest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ragged {
    lens: Vec<usize>,
}

impl Ragged {
    /// Lists of the given lengths, none of them empty.
    pub fn new(lens: Vec<usize>) -> Self {
        debug_assert!(lens.iter().all(|&len| len > 0), "padding repeats the first");
        Self { lens }
    }

    /// Length of each list.
    pub fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Number of lists, B.
    pub fn num_lists(&self) -> usize {
        self.lens.len()
    }

    /// Length of the longest list, L.
    pub fn padded_len(&self) -> usize {
        self.lens.iter().max().copied().unwrap_or(0)
    }

    fn is_even(&self) -> bool {
        self.lens.iter().all(|&len| len == self.padded_len())
    }

    /// `[1, N, X]` to `[B, L, X]`. Padding repeats the first entry of its list: finite, and never to be read.
    pub fn pad(&self, flat: Tensor<3>) -> Tensor<3> {
        let [_, _, width] = flat.dims();
        let shape = [self.num_lists(), self.padded_len(), width];
        if self.is_even() {
            return flat.reshape(shape);
        }
        let mut start = 0;
        let mut places = Vec::with_capacity(shape[0] * shape[1]);
        for &len in &self.lens {
            places.extend(start..start + len);
            places.extend(std::iter::repeat_n(start, shape[1] - len));
            start += len;
        }
        let places = index_tensor(places, &flat.device());
        flat.select(1, places).reshape(shape)
    }

    /// `[B, L, X]` to `[1, N, X]`: the inverse of [`Ragged::pad`].
    pub fn flatten(&self, padded: Tensor<3>) -> Tensor<3> {
        let [num_lists, len, width] = padded.dims();
        let flat = padded.reshape([1, num_lists * len, width]);
        if self.is_even() {
            return flat;
        }
        let lists = self.lens.iter().enumerate();
        let places = lists.flat_map(|(list, &real)| list * len..list * len + real);
        let places = index_tensor(places, &flat.device());
        flat.select(1, places)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;

    #[test]
    fn padding_repeats_the_first_entry_and_flattening_undoes_it() {
        let device = Device::flex();
        let ragged = Ragged::new(vec![2, 3, 1]);
        let values: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let flat = Tensor::<3>::from_data(TensorData::new(values.clone(), [1, 6, 2]), &device);
        let padded = ragged.pad(flat);
        assert_eq!(padded.dims(), [3, 3, 2]);
        let seen = padded.clone().into_data().try_into_vec::<f32>();
        let expected = [0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 8, 9, 10, 11, 10, 11, 10, 11];
        assert_eq!(seen.ok(), Some(expected.map(|i: u8| f32::from(i)).to_vec()));
        let again = ragged.flatten(padded).into_data().try_into_vec::<f32>();
        assert_eq!(again.ok(), Some(values));
    }
}
