//! The prompts that an evaluation decodes, later turns of conversations among them.

use draftsmith_data::mask::Marker;
use draftsmith_data::prompts::{self, Prompt, PromptSettings};
use draftsmith_data::source::Roles;
use draftsmith_data::tokenizer::ChatTokenizer;
use draftsmith_eval::config::{EvalConfig, SuiteConfig};
use draftsmith_eval::decode::Sequence;
use draftsmith_eval::suite::{Origin, Suite};
use draftsmith_models::generate::{self, GenerateSettings};
use draftsmith_models::rng::{Purpose, stable_hash};
use draftsmith_models::sample::Sampling;

use crate::errors::CliError;
use crate::progress::Progress;
use crate::session::Session;

/// The prompts of `suites`, or those of the validation rows when there are none.
pub(super) fn all(session: &Session, config: &EvalConfig) -> anyhow::Result<Vec<Suite>> {
    let mut suites = Vec::new();
    if config.suites.is_empty() {
        suites.push(validation_suite(session)?);
    }
    for suite in &config.suites {
        suites.extend(configured(session, config, suite)?);
    }
    match suites.iter().find(|suite| suite.prompts.is_empty()) {
        None => Ok(suites),
        Some(empty) => Err(nothing_to_decode(&format!(
            "suite `{}` holds no usable prompt",
            empty.name
        ))),
    }
}

pub(super) fn nothing_to_decode(reason: &str) -> anyhow::Error {
    let hint = "name prompt files in `[eval] suites`, or set `data.validation_fraction`";
    CliError::usage(format!("nothing to decode: {reason}"), hint).into()
}

fn validation_suite(session: &Session) -> anyhow::Result<Suite> {
    let dataset = super::dataset(session)?;
    let split = super::split(session, &dataset);
    let prompts = split.validation[0].iter().map(|&index| Sequence {
        id: dataset.key(index).to_owned(),
        prompt: dataset.row(index).ids[..dataset.prompt_len(index)].to_vec(),
    });
    Ok(Suite::of_prompts("validation", prompts.collect()))
}

/// A suite of first turns, or one for each temperature: later turns follow the answers to earlier ones, which differ.
fn configured(
    session: &Session,
    config: &EvalConfig,
    suite: &SuiteConfig,
) -> anyhow::Result<Vec<Suite>> {
    let tokenizer = super::tokenizer(session)?;
    let prompts = read(session, config, suite, &tokenizer)?;
    let first: Vec<(usize, Prompt)> = prompts.into_iter().map(|prompt| (0, prompt)).collect();
    if suite.turns == 1 || first.iter().all(|(_, prompt)| prompt.later.is_empty()) {
        return Ok(vec![with_origins(&suite.name, None, first)]);
    }
    let asker = Asker {
        session,
        config,
        suite,
        tokenizer: &tokenizer,
    };
    let temperatures = config.temperatures.iter();
    temperatures
        .map(|&temperature| {
            let asked = asker.ask_on(config.sampling(temperature), first.clone())?;
            Ok(with_origins(&suite.name, Some(temperature), asked))
        })
        .collect()
}

/// Longest prompt behind which there is room for an answer.
fn longest_prompt(session: &Session, config: &EvalConfig) -> usize {
    let room = config.max_new_tokens + config.gamma.max();
    session.spec().max_position_embeddings.saturating_sub(room)
}

fn read(
    session: &Session,
    config: &EvalConfig,
    suite: &SuiteConfig,
    tokenizer: &ChatTokenizer,
) -> anyhow::Result<Vec<Prompt>> {
    let data = &session.run_file().data;
    let settings = PromptSettings {
        roles: &Roles::new(&data.roles)?,
        options: &data.template_options,
        limit: suite.limit,
        max_len: longest_prompt(session, config),
    };
    let read = prompts::read(std::slice::from_ref(&suite.file), tokenizer, &settings)?;
    let dropped = read.counts.read - read.counts.kept;
    if dropped > 0 {
        session.console().warn(&format!(
            "suite `{}`: {dropped} of {} rows dropped ({})",
            suite.name,
            read.counts.read,
            read.counts.reasons()
        ));
    }
    Ok(read.prompts)
}

/// Prompts by their turn, from 0.
fn with_origins(name: &str, temperature: Option<f64>, prompts: Vec<(usize, Prompt)>) -> Suite {
    let origins = prompts.iter().map(|(_, prompt)| Origin {
        conversation: prompt.key.clone(),
        category: prompt.category.clone(),
    });
    Suite {
        name: name.to_owned(),
        origins: origins.collect(),
        temperature,
        prompts: prompts
            .into_iter()
            .map(|(turn, prompt)| Sequence {
                id: turn_id(&prompt.key, turn),
                prompt: prompt.ids,
            })
            .collect(),
    }
}

/// First turns are called like their conversation.
fn turn_id(conversation: &str, turn: usize) -> String {
    match turn {
        0 => conversation.to_owned(),
        _ => format!("{conversation}#{}", turn + 1),
    }
}

/// Goes on with conversations: the target answers by plain decoding, so that later prompts are the same whoever drafts.
struct Asker<'a> {
    session: &'a Session,
    config: &'a EvalConfig,
    suite: &'a SuiteConfig,
    tokenizer: &'a ChatTokenizer,
}

impl Asker<'_> {
    /// The first turns with all later ones that are to be asked.
    fn ask_on(
        &self,
        sampling: Sampling,
        first: Vec<(usize, Prompt)>,
    ) -> anyhow::Result<Vec<(usize, Prompt)>> {
        let mut asked = first;
        let mut newest = 0;
        for turn in 1..self.suite.turns {
            let open = asked[newest..].iter().map(|(_, prompt)| prompt);
            let open: Vec<&Prompt> = open.filter(|prompt| !prompt.later.is_empty()).collect();
            if open.is_empty() {
                break;
            }
            let answers = self.answers(sampling, turn - 1, &open)?;
            let next = self.next_turns(&open, &answers)?;
            newest = asked.len();
            asked.extend(next.into_iter().map(|prompt| (turn, prompt)));
        }
        Ok(asked)
    }

    fn answers(
        &self,
        sampling: Sampling,
        turn: usize,
        prompts: &[&Prompt],
    ) -> anyhow::Result<Vec<String>> {
        let settings = GenerateSettings {
            sampling,
            max_new_tokens: self.config.max_new_tokens,
            stop_ids: super::stop_ids(self.session)?,
            seed: self.config.seed,
            purpose: Purpose::History,
        };
        let console = self.session.console();
        let label = format!("eval: earlier turns of {}", self.suite.name);
        let progress = Progress::new(console, label, Some(prompts.len() as u64), "prompts");
        let mut answers = Vec::new();
        for batch in prompts.chunks(self.config.batch_rows.max()) {
            let of_batch = |prompt: &&Prompt| generate::Prompt {
                ids: prompt.ids.clone(),
                stream: stable_hash(&turn_id(&prompt.key, turn)),
            };
            let batch: Vec<generate::Prompt> = batch.iter().map(of_batch).collect();
            let interrupt = self.session.interrupt();
            let target = self.session.target()?;
            let found = generate::generate(target, &batch, &settings, |_| !interrupt.is_asked());
            let Some(found) = found else {
                let typed = self.session.typed();
                let message = format!("`draftsmith eval {typed}` begins again with earlier turns");
                return Err(CliError::Interrupted(message).into());
            };
            for answer in found {
                answers.push(self.tokenizer.decode_plain(&answer.ids)?);
            }
            progress.set(answers.len() as u64);
        }
        progress.finish(prompts.len() as u64);
        Ok(answers)
    }

    fn next_turns(&self, open: &[&Prompt], answers: &[String]) -> anyhow::Result<Vec<Prompt>> {
        let template = self.tokenizer.template()?;
        let options = &self.session.run_file().data.template_options;
        let marker = Marker::new(self.tokenizer, template, options);
        let longest = longest_prompt(self.session, self.config);
        let next = open.iter().zip(answers);
        let next = next.filter_map(|(prompt, answer)| prompt.next(answer, &marker).ok().flatten());
        let next: Vec<Prompt> = next.filter(|prompt| prompt.ids.len() <= longest).collect();
        if next.len() < open.len() {
            self.session.console().warn(&format!(
                "suite `{}`: {} later turns dropped, longer than the target's context or refused by the template",
                self.suite.name,
                open.len() - next.len()
            ));
        }
        Ok(next)
    }
}
