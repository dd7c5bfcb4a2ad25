//! Rotary position embedding in place.

use rayon::prelude::*;

use super::row::vectorised;

/// Angles of every position of a call, flat `[B, S, D/2]` each.
#[derive(Clone, Debug)]
pub struct HostAngles {
    /// Cosines.
    pub cos: Vec<f32>,
    /// Sines.
    pub sin: Vec<f32>,
}

/// Rotates `values`, flat `[B, heads, S, D]`: the halves `(x1, x2)` of a head become
/// `(x1 c - x2 s, x2 c + x1 s)`.
pub fn rotate(values: &mut [f32], shape: [usize; 4], angles: &HostAngles) {
    turn(values, shape, angles, 1.0);
}

/// The inverse of [`rotate`], which is also its gradient.
pub fn rotate_back(values: &mut [f32], shape: [usize; 4], angles: &HostAngles) {
    turn(values, shape, angles, -1.0);
}

fn turn(
    values: &mut [f32],
    [_, heads, len, head_dim]: [usize; 4],
    angles: &HostAngles,
    direction: f32,
) {
    let half = head_dim / 2;
    values
        .par_chunks_exact_mut(len * head_dim)
        .enumerate()
        .for_each(|(index, positions)| {
            let start = index / heads * len * half;
            let range = start..start + len * half;
            let (cos, sin) = (&angles.cos[range.clone()], &angles.sin[range]);
            vectorised(|| {
                let angles = cos.chunks_exact(half).zip(sin.chunks_exact(half));
                for (head, (cos, sin)) in positions.chunks_exact_mut(head_dim).zip(angles) {
                    let (first, second) = head.split_at_mut(half);
                    for i in 0..half {
                        let (x1, x2) = (first[i], second[i]);
                        let sin = direction * sin[i];
                        first[i] = x1 * cos[i] - x2 * sin;
                        second[i] = x2 * cos[i] + x1 * sin;
                    }
                }
            });
        });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_head_of_a_position_turns_by_that_positions_angles() {
        let (batch, heads, len, half) = (2, 3, 4, 5);
        let angle = |b: usize, s: usize, i: usize| (b * 7 + s * 3 + i) as f32 * 0.37;
        let table = |f: fn(f32) -> f32| {
            let mut values = Vec::new();
            for b in 0..batch {
                for s in 0..len {
                    values.extend((0..half).map(|i| f(angle(b, s, i))));
                }
            }
            values
        };
        let angles = HostAngles {
            cos: table(f32::cos),
            sin: table(f32::sin),
        };
        let total = batch * heads * len * 2 * half;
        let before: Vec<f32> = (0..total).map(|i| (i % 17) as f32 - 8.0).collect();
        let mut after = before.clone();
        rotate(&mut after, [batch, heads, len, 2 * half], &angles);
        for (index, (old, new)) in before
            .chunks(2 * half)
            .zip(after.chunks(2 * half))
            .enumerate()
        {
            let (b, s) = (index / (heads * len), index % len);
            for i in 0..half {
                let (sin, cos) = angle(b, s, i).sin_cos();
                assert!((new[i] - (old[i] * cos - old[half + i] * sin)).abs() < 1e-5);
                assert!((new[half + i] - (old[half + i] * cos + old[i] * sin)).abs() < 1e-5);
            }
        }
        rotate_back(&mut after, [batch, heads, len, 2 * half], &angles);
        for (old, new) in before.iter().zip(&after) {
            assert!((old - new).abs() < 1e-5); // two turns of values below 9, each rounded
        }
    }
}
