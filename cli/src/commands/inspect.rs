//! `draftsmith inspect`: what training will see, for people to read.

use draftsmith_data::inspect;
use draftsmith_models::drafter::{AnyDrafter, DrafterContext};
use draftsmith_models::vocab::VocabMap;

use crate::session::Session;
use crate::stages;

/// Prints the first `rows` rows of the prepared data with marks and slots, and vocabulary coverage.
pub(crate) fn inspect(session: &Session, rows: usize) -> anyhow::Result<()> {
    let dataset = stages::dataset(session)?;
    let tokenizer = stages::tokenizer(session)?;
    let num_depths = num_depths(session)?;
    let console = session.console();
    if !console.is_json() {
        console.result(&inspect::render_counts(&dataset));
    }
    for index in 0..rows.min(dataset.len()) {
        let row = inspect::row(&dataset, index, num_depths, &tokenizer)?;
        console.value(&row, || inspect::render_row(&row))?;
    }
    let coverage = inspect::coverage(&dataset, session.spec().vocab_size)?;
    console.value(&coverage, || inspect::render_coverage(&coverage))
}

/// The most depths any drafter of the run file has.
fn num_depths(session: &Session) -> anyhow::Result<usize> {
    let vocab = VocabMap::full(session.spec().vocab_size);
    let mut most = 1;
    for run in &session.run_file().drafter.0 {
        let context = DrafterContext {
            target: session.spec(),
            ends: session.target()?.ends(),
            vocab: &vocab,
        };
        let drafter = AnyDrafter::init(&run.config, context, 0, session.device())?;
        most = most.max(drafter.num_depths());
    }
    Ok(most)
}
