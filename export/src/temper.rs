//! A draft temperature in the weights: engines that draw drafts do so at the target's temperature, and know no other.
//!
//! Drafts drawn at `c` times the target's temperature are drafts of logits divided by `c`, and the logits of every family
//! are linear in some of its tensors. Only engines that draw drafts see the difference: the most probable token stays.

use draftsmith_models::checkpoint::DrafterCard;
use draftsmith_models::drafter::DrafterConfig;

/// Tensors of a checkpoint which the logits of an engine are linear in, together, and nothing else depends on; `None` where a
/// layout holds none.
pub fn logit_tensors(card: &DrafterCard) -> Option<&'static [&'static str]> {
    match &card.drafter {
        DrafterConfig::Eagle3(_) => Some(&["head"]),
        // Engines take the target's head, DFlash's sometimes even where rows of a reduced vocabulary are written. The next depth of
        // MTP reads this norm's output through another one, which takes its size away.
        DrafterConfig::Mtp(_) | DrafterConfig::Dflash(_) => Some(&["norm"]),
        // The confidence reads what the last norm gives.
        DrafterConfig::Dspark(_) if !card.vocab.is_full() => Some(&["core.head", "markov_out"]),
        DrafterConfig::Dspark(config) if !config.has_confidence() => {
            Some(&["core.norm", "markov_out"])
        }
        _ => None,
    }
}
