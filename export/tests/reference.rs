//! An exported folder, computed by an implementation that shares no code with the drafter.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::allow_attributes,
    reason = "tests"
)]

mod common;

use common::{Case, Wanted, chain, fed_token, scattered_ids, values};
use draftsmith_models::drafter::eagle3::{AuxNorm, Eagle3Config};
use draftsmith_models::weights::{WeightFolder, host_values};
use serde_json::{Value, json};

/// The published forward pass in f64 over plain vectors, from the exported names and keys only.
struct Reference {
    config: Value,
    weights: WeightFolder,
    embedding: Vec<f32>,
    /// Key and value rows seen so far, all heads side by side.
    cache: Vec<(Vec<f64>, Vec<f64>)>,
}

impl Reference {
    fn number(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap() as usize
    }

    /// `W x` for a `[out, in]` matrix of the file.
    fn apply(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let weight = values(&self.weights, name);
        weight
            .chunks_exact(x.len())
            .map(|row| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum())
            .collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        self.norm_by(&values(&self.weights, name), x)
    }

    fn norm_by(&self, gain: &[f32], x: &[f64]) -> Vec<f64> {
        let eps = self.config["rms_norm_eps"].as_f64().unwrap();
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        x.iter()
            .zip(gain)
            .map(|(x, g)| x / (mean + eps).sqrt() * f64::from(*g))
            .collect()
    }

    /// The captured states as `fc` reads them, by the switches of the file.
    fn normed_states(&self, states: Vec<f64>) -> Vec<f64> {
        if self.config["norm_before_fc"] == json!(true) {
            return self.norm("input_norm.weight", &states);
        }
        if self.config["fc_norm"] != json!(true) {
            return states;
        }
        let each = states.chunks_exact(self.number("hidden_size"));
        each.enumerate()
            .flat_map(|(index, state)| self.norm(&format!("fc_norm.{index}.weight"), state))
            .collect()
    }

    /// Half-rotation rotary embedding of each head in place.
    fn rotate(&self, x: &mut [f64], position: usize) {
        let dim = self.number("head_dim");
        let theta = self.config["rope_parameters"]["rope_theta"]
            .as_f64()
            .unwrap();
        for head in x.chunks_exact_mut(dim) {
            for i in 0..dim / 2 {
                let angle = position as f64 * theta.powf(-2.0 * i as f64 / dim as f64);
                let (a, b) = (head[i], head[i + dim / 2]);
                head[i] = a * angle.cos() - b * angle.sin();
                head[i + dim / 2] = b * angle.cos() + a * angle.sin();
            }
        }
    }

    /// One position: token, feature and rotary position in; (next feature, logits) out.
    fn step(&mut self, token: u32, feature: &[f64], position: usize) -> (Vec<f64>, Vec<f64>) {
        let width = self.number("hidden_size");
        let row = token as usize * width;
        let embedded: Vec<f64> = self.embedding[row..row + width]
            .iter()
            .map(|x| f64::from(*x))
            .collect();
        let mut input = self.norm("midlayer.input_layernorm.weight", &embedded);
        let normed = self.norm("midlayer.hidden_norm.weight", feature);
        input.extend(&normed);
        let mut q = self.apply("midlayer.self_attn.q_proj.weight", &input);
        let mut k = self.apply("midlayer.self_attn.k_proj.weight", &input);
        let v = self.apply("midlayer.self_attn.v_proj.weight", &input);
        self.rotate(&mut q, position);
        self.rotate(&mut k, position);
        self.cache.push((k, v));
        let mixed = self.attend(&q);
        let attention = self.apply("midlayer.self_attn.o_proj.weight", &mixed);
        let residual = if self.config["norm_before_residual"] == json!(true) {
            &normed
        } else {
            feature
        };
        let hidden: Vec<f64> = residual.iter().zip(attention).map(|(a, b)| a + b).collect();
        let x = self.norm("midlayer.post_attention_layernorm.weight", &hidden);
        let gate = self.apply("midlayer.mlp.gate_proj.weight", &x);
        let up = self.apply("midlayer.mlp.up_proj.weight", &x);
        let gated: Vec<f64> = gate
            .iter()
            .zip(up)
            .map(|(g, u)| g / (1.0 + (-g).exp()) * u)
            .collect();
        let mlp = self.apply("midlayer.mlp.down_proj.weight", &gated);
        let output: Vec<f64> = hidden.iter().zip(mlp).map(|(a, b)| a + b).collect();
        let normed = self.norm("norm.weight", &output);
        let logits = self.apply("lm_head.weight", &normed);
        if self.config["norm_output"] == json!(true) {
            return (normed, logits);
        }
        (output, logits)
    }

    /// Query head `h` reads key-value head `h / group` of every row seen so far.
    fn attend(&self, q: &[f64]) -> Vec<f64> {
        let dim = self.number("head_dim");
        let group = self.number("num_attention_heads") / self.number("num_key_value_heads");
        let mut mixed = Vec::with_capacity(q.len());
        for (head, q) in q.chunks_exact(dim).enumerate() {
            let at = head / group * dim..(head / group + 1) * dim;
            let scores: Vec<f64> = self
                .cache
                .iter()
                .map(|(k, _)| {
                    let dot: f64 = q.iter().zip(&k[at.clone()]).map(|(a, b)| a * b).sum();
                    (dot / (dim as f64).sqrt()).exp()
                })
                .collect();
            let total: f64 = scores.iter().sum();
            mixed.extend(at.map(|channel| {
                let weighted = self.cache.iter().zip(&scores);
                weighted
                    .map(|((_, v), s)| s / total * v[channel])
                    .sum::<f64>()
            }));
        }
        mixed
    }
}

/// Logits at every position, then of two more chained depths.
fn reference_logits(case: &Case, aux: &[f32], ids: &[u32]) -> Vec<Vec<f64>> {
    let (_, config, weights) = case.export("native");
    let target = WeightFolder::open(&case.target()).unwrap();
    let embedding = values(&target, "model.embed_tokens.weight");
    let mut reference = Reference {
        config,
        weights,
        embedding,
        cache: Vec::new(),
    };
    let mut all = Vec::new();
    let mut feature = Vec::new();
    for (position, &id) in ids.iter().enumerate() {
        let width = aux.len() / ids.len();
        let states: Vec<f64> = aux[position * width..(position + 1) * width]
            .iter()
            .map(|x| f64::from(*x))
            .collect();
        let states = reference.normed_states(states);
        let fused = if reference.config["eagle_config"]["use_aux_hidden_state"] == json!(false) {
            let gain = values(&target, "model.norm.weight");
            reference.norm_by(&gain, &states)
        } else {
            reference.apply("fc.weight", &states)
        };
        let (output, logits) = reference.step(id, &fused, position);
        feature = output;
        all.push(logits);
    }
    for step in 1..3 {
        let (output, logits) = reference.step(fed_token(step), &feature, ids.len() - 1 + step);
        feature = output;
        all.push(logits);
    }
    all
}

fn largest_difference(ours: &[f32], theirs: &[f64]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    ours.iter()
        .zip(theirs)
        .map(|(a, b)| (f64::from(*a) - b).abs())
        .fold(0.0, f64::max)
}

fn check(case: &Case) {
    let (aux, ids) = case.context(10);
    let flat = host_values(&aux);
    let theirs = reference_logits(case, &flat, &ids);
    let width = flat.len() / 10;
    for position in 0..10 {
        let seen = aux.clone().slice([0..1, 0..position + 1, 0..width]);
        let ours = chain(&case.drafter, &case.ends, (seen, &ids[..=position]), 1);
        let difference = largest_difference(&ours[0], &theirs[position]);
        // Logits reach about 10; f32 sums over 48 products keep 1e-6 relative.
        assert!(difference < 1e-4, "position {position}: {difference}");
    }
    let ours = chain(&case.drafter, &case.ends, (aux, &ids), 3);
    for depth in 1..3 {
        let difference = largest_difference(&ours[depth], &theirs[9 + depth]);
        assert!(difference < 1e-4, "depth {depth}: {difference}");
    }
}

/// Pitfall 72: hidden = heads x head size, so `o_proj` is square and a transposed or reordered matrix
/// has the right shape; 4 query heads share 2 key-value heads.
/// Red under: the names of `k_proj` and `v_proj` swapped in `names::eagle3`; also under the head index
/// taken modulo the group in the reference.
#[test]
fn pitfall_72_an_independent_implementation_reads_the_same_model() {
    check(&Case::new(Wanted {
        draft_ids: Some(scattered_ids()),
        ..Wanted::default()
    }));
}

#[test]
fn the_reference_agrees_with_all_norms_and_larger_heads_too() {
    check(&Case::new(Wanted {
        config: json!({"head_dim": 8, "rope_theta": 10000.0}),
        drafter: Eagle3Config {
            aux_layer_ids: Some(vec![0, 3, 6, 7]),
            aux_norm: AuxNorm::Concatenated,
            norm_before_residual: true,
            norm_output: true,
            ..Eagle3Config::default()
        },
        other: None,
        draft_ids: None,
    }));
}

/// EAGLE-3.1. Red under: `fc_norm.{index}` replaced by `fc_norm.{num_captured - 1 - index}` in `names::aux_norms`.
#[test]
fn the_reference_agrees_with_a_norm_of_each_state() {
    check(&Case::new(Wanted {
        drafter: Eagle3Config {
            aux_layer_ids: Some(vec![0, 3, 6, 7]),
            aux_norm: AuxNorm::Each,
            norm_output: true,
            ..Eagle3Config::default()
        },
        draft_ids: Some(scattered_ids()),
        ..Wanted::default()
    }));
}

/// The target's final state after its final norm, without `fc`. Red under: `ends.normed` left out of
/// `Eagle3::prepared`.
#[test]
fn the_reference_agrees_without_captured_states() {
    check(&Case::new(Wanted {
        drafter: Eagle3Config {
            aux_layer_ids: Some(Vec::new()),
            ..Eagle3Config::default()
        },
        draft_ids: Some(scattered_ids()),
        ..Wanted::default()
    }));
}
