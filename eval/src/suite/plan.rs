//! [`Cell`]: one decode of a run, and the order of all.

use draftsmith_models::sample::Sampling;

use super::{Suite, SuiteRun};
use crate::decode::DecodeSettings;
use crate::error::EvalError;
use crate::exact::Candidate;
use crate::propose::tree::TreeShape;
use crate::propose::{
    DrafterProposer, MODEL, ModelProposer, NoProposer, PromptLookup, Proposer, SuffixLookup,
};
use crate::verify::{self, SpeculativeSampling, VerifyRule};

/// What drafts in a decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// Nothing: plain decoding.
    Plain,
    PromptLookup,
    Suffix,
    Model,
    /// A trained drafter by its place.
    Drafter(usize),
}

/// One decode.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell<'a> {
    pub(super) suite: &'a Suite,
    pub(super) rule: &'static dyn VerifyRule,
    pub(super) sampling: Sampling,
    /// Drafts a round; 0 for plain decoding.
    pub(super) gamma: usize,
    pub(super) source: Source,
    /// Sequences decoded together.
    pub(super) batch_rows: usize,
    /// Trees of drafts instead of chains.
    pub(super) tree: Option<TreeShape>,
}

impl Cell<'_> {
    /// The proposer's name, with the tree where there is one.
    pub(super) fn label(&self, proposer: &str) -> String {
        match self.tree {
            None => proposer.to_owned(),
            Some(tree) => format!("{proposer} tree {}x{}", tree.width, tree.nodes),
        }
    }

    /// The plain decoding that this one is compared with, under `rule`.
    pub(super) fn without_drafts(&self, rule: &'static dyn VerifyRule) -> Self {
        Self {
            rule: plain_rule(rule),
            gamma: 0,
            source: Source::Plain,
            tree: None,
            ..*self
        }
    }

    pub(super) fn is_plain(&self) -> bool {
        self.source == Source::Plain
    }
}

impl<'a> SuiteRun<'a> {
    /// All decodes in the order of the report: by suite, temperature, batch, rule, gamma and proposer, each rule behind
    /// the plain decoding that it is compared with.
    pub(super) fn cells(&self) -> Result<Vec<Cell<'a>>, EvalError> {
        let mut cells = Vec::new();
        for suite in self.suites {
            let only = suite.temperature.map(f64::to_bits);
            let temperatures = self.config.temperatures.iter();
            let is_asked = |at: &&f64| only.is_none_or(|only| only == at.to_bits());
            for &temperature in temperatures.filter(is_asked) {
                for &batch_rows in &self.config.batch_rows {
                    let plain = Cell {
                        suite,
                        rule: &SpeculativeSampling,
                        sampling: self.config.sampling(temperature),
                        gamma: 0,
                        source: Source::Plain,
                        batch_rows,
                        tree: None,
                    };
                    self.add_cells(plain, &mut cells)?;
                }
            }
        }
        Ok(cells)
    }

    /// Adds all decodes that differ from `plain` in rule, gamma and proposer.
    fn add_cells(&self, plain: Cell<'a>, cells: &mut Vec<Cell<'a>>) -> Result<(), EvalError> {
        let mut plain_rules: Vec<&str> = Vec::new();
        for rule in self.rules(&plain.sampling)? {
            let without_drafts = plain_rule(rule);
            if self.is_compared(rule) && !plain_rules.contains(&without_drafts.name()) {
                plain_rules.push(without_drafts.name());
                cells.push(plain.without_drafts(rule));
            }
            for &gamma in &self.config.gamma {
                let cell = |source| Cell {
                    rule,
                    gamma,
                    source,
                    ..plain
                };
                cells.extend(self.sources().into_iter().map(cell));
                let tree = self.config.tree().filter(|_| rule.walks_trees());
                let drafters = (0..self.drafters.len()).filter(|_| tree.is_some());
                cells.extend(drafters.map(|index| Cell {
                    tree,
                    ..cell(Source::Drafter(index))
                }));
            }
        }
        Ok(())
    }

    /// Whether the decodes of a rule have a plain one beside them: for their text, or because it is reported.
    pub(super) fn is_compared(&self, rule: &dyn VerifyRule) -> bool {
        rule.is_drafter_invariant() || self.config.has_baseline("none")
    }

    /// The rules at a temperature: `greedy` at 0, else those of the settings.
    fn rules(&self, sampling: &Sampling) -> Result<Vec<&'static dyn VerifyRule>, EvalError> {
        let mut rules: Vec<&'static dyn VerifyRule> = Vec::new();
        for name in &self.config.rule {
            let rule = verify::for_sampling(name, sampling)?;
            if !rules.iter().any(|known| known.name() == rule.name()) {
                rules.push(rule);
            }
        }
        Ok(rules)
    }

    /// Everything that drafts: the baselines asked for, then the trained drafters.
    fn sources(&self) -> Vec<Source> {
        let baselines = [
            ("prompt_lookup", Source::PromptLookup),
            ("suffix", Source::Suffix),
            (MODEL, Source::Model),
        ];
        let asked = baselines
            .into_iter()
            .filter(|(name, _)| self.config.has_baseline(name))
            .map(|(_, source)| source);
        let drafters = (0..self.drafters.len()).map(Source::Drafter);
        asked.chain(drafters).collect()
    }

    /// The proposer of a source.
    pub(super) fn proposer(&self, source: Source) -> Result<Box<dyn Proposer + 'a>, EvalError> {
        Ok(match source {
            Source::Plain => Box::new(NoProposer),
            Source::PromptLookup => Box::new(PromptLookup::new(self.config.lookup())),
            Source::Suffix => Box::new(SuffixLookup::new(self.config.suffix_min)),
            Source::Model => {
                let model = self.draft_model.ok_or_else(|| {
                    EvalError::setting(
                        "the baseline `model` has no model",
                        "set `eval.draft_model` to its folder",
                    )
                })?;
                Box::new(ModelProposer::new(model, self.target.spec().vocab_size)?)
            }
            Source::Drafter(index) => {
                let named = &self.drafters[index];
                let ends = self.target.ends();
                let name = named.name.clone();
                let proposer = DrafterProposer::new(name, named.drafter, ends, named.vocab);
                Box::new(proposer.calibrated(named.calibration))
            }
        })
    }

    /// The drafter of a source, where it is a trained one.
    pub(super) fn candidate(&self, source: Source) -> Option<Candidate<'a>> {
        let Source::Drafter(index) = source else {
            return None;
        };
        let named = &self.drafters[index];
        Some(Candidate {
            drafter: named.drafter,
            ends: self.target.ends(),
            vocab: named.vocab,
            calibration: named.calibration,
        })
    }

    /// How a cell is decoded.
    pub(super) fn settings(&self, cell: &Cell<'_>) -> DecodeSettings {
        DecodeSettings {
            sampling: cell.sampling,
            gamma: cell.gamma,
            max_new_tokens: self.config.max_new_tokens,
            stop_ids: self.stop_ids.to_vec(),
            batch_rows: cell.batch_rows,
            batch_invariant: self.config.batch_invariant,
            tree: cell.tree,
            seed: self.config.seed,
        }
    }
}

/// The rule of the plain decoding that a rule is compared with: without drafts, all rules that draw without shared noise
/// draw the same text.
pub(super) fn plain_rule(rule: &'static dyn VerifyRule) -> &'static dyn VerifyRule {
    if rule.is_drafter_invariant() {
        rule
    } else {
        &SpeculativeSampling
    }
}
