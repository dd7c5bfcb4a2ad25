//! Captured layers in foreign conventions.
//!
//! Ours and SGLang's id names the block whose *output* is taken (OUT); vLLM, speculators and
//! llama.cpp name the block whose *input* it is (IN = OUT + 1). The same key appears in both meanings:
//!
//! | key | meaning | read by |
//! |---|---|---|
//! | top-level `eagle_aux_hidden_state_layer_ids` | IN | vLLM, speculators, llama.cpp |
//! | `eagle_config.eagle_aux_hidden_state_layer_ids` | OUT | SGLang, SpecForge |
//!
//! vLLM lets the top-level list win, so a file with both serves everyone.

/// Ids as the top-level key wants them: the block whose input is taken.
pub fn input_ids(ours: &[usize]) -> Vec<usize> {
    ours.iter().map(|id| id + 1).collect()
}

/// Ours from a top-level list; `None` when it holds the embeddings (0), which is no block's output.
pub fn from_input_ids(foreign: &[usize]) -> Option<Vec<usize>> {
    foreign.iter().map(|id| id.checked_sub(1)).collect()
}

/// What every engine captures when a configuration names no layers, as our ids for N blocks.
pub fn engine_default(num_layers: usize) -> Option<Vec<usize>> {
    from_input_ids(&[2, num_layers / 2, num_layers.checked_sub(3)?])
}
