//! Step loop, optimizer, checkpoints and logs; the objective is that of `draftsmith-models`.
//!
//! [`run::train`] is the entry: it takes the settings of a run file and the parts it trains with (data
//! rows, hidden states, a validator), and leaves checkpoints and logs in a folder. The data order, the
//! learning rate and every random choice are pure functions of the settings and the step number, so a
//! resumed run repeats an undisturbed one bit for bit.

pub mod checkpoint;
pub mod clip;
pub mod config;
pub mod device_check;
pub mod error;
pub mod log;
mod muon;
pub mod observe;
pub mod optimizer;
pub mod order;
pub mod parts;
pub mod run;
pub mod schedule;
mod start;
pub mod step;
pub mod survey;

pub use burn_train::Interrupter;
pub use error::TrainerError;
pub use run::{Outcome, Parts, Resume, RunSettings, Summary, plan, refuse_missing_anchors, train};
