//! `draftsmith inspect`: what training will see, for people to read.

use draftsmith_data::inspect::{self, InspectedRow, VocabularyCoverage};
use draftsmith_models::drafter::{AnyDrafter, DrafterContext};
use draftsmith_models::vocab::VocabMap;
use serde::Serialize;

use crate::session::Session;
use crate::stages;

/// Prints the first `rows` rows of the prepared data with marks and slots, and vocabulary coverage.
pub(crate) fn inspect(session: &Session, rows: usize) -> anyhow::Result<()> {
    let dataset = stages::dataset(session)?;
    let tokenizer = stages::tokenizer(session)?;
    let num_depths = num_depths(session)?;
    let rows: Vec<InspectedRow> = (0..rows.min(dataset.len()))
        .map(|index| inspect::row(&dataset, index, num_depths, &tokenizer))
        .collect::<Result<_, _>>()?;
    let coverage = inspect::coverage(&dataset, session.spec().vocab_size)?;
    let counts = inspect::render_counts(&dataset);
    let found = Inspection { rows, coverage };
    session.console().value(&found, || {
        let rows = found.rows.iter().map(inspect::render_row);
        let rows: Vec<String> = rows.collect();
        let coverage = inspect::render_coverage(&found.coverage);
        format!("{counts}\n{}\n{coverage}", rows.join("\n"))
    })
}

/// Everything that is shown, as one JSON document.
#[derive(Debug, Serialize)]
struct Inspection {
    rows: Vec<InspectedRow>,
    coverage: VocabularyCoverage,
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
