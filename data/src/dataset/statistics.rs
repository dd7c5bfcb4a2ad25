//! [`Summary`]: lengths and sources of a data set, computed over a polars table of its rows.

use polars::prelude::{
    ChunkQuantile, ChunkedArray, Column, DataFrame, PolarsError, QuantileMethod, UInt64Type,
};
use serde::{Deserialize, Serialize};

use super::DatasetRow;
use crate::error::DataError;

/// Quantiles of a length, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LengthQuantiles {
    /// Shortest row.
    pub min: usize,
    /// Median.
    pub median: usize,
    /// 90 percent of the rows are at most this long.
    pub p90: usize,
    /// 99 percent of the rows are at most this long.
    pub p99: usize,
    /// Longest row.
    pub max: usize,
}

/// Totals of one source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceSummary {
    /// Name of the source.
    pub source: String,
    /// Rows.
    pub rows: usize,
    /// Tokens.
    pub tokens: usize,
    /// Tokens that the target generated.
    pub generated_tokens: usize,
    /// Rows that were cut to the maximum length.
    pub clipped: usize,
}

/// Lengths and sources of a data set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Summary {
    /// Lengths of whole rows.
    pub row_len: LengthQuantiles,
    /// Numbers of generated tokens of the rows.
    pub generated_len: LengthQuantiles,
    /// Totals by source, in order of first appearance.
    pub sources: Vec<SourceSummary>,
}

impl Summary {
    /// Summarises the rows.
    ///
    /// # Errors
    /// [`DataError::Setting`] with what the table library said; it means a fault of this program.
    pub(super) fn of(rows: &[DatasetRow]) -> Result<Self, DataError> {
        summarise(rows).map_err(|e| {
            DataError::setting(
                format!("the statistics of the data set failed: {e}"),
                "this is a fault of the program, not of the data",
            )
        })
    }
}

fn summarise(rows: &[DatasetRow]) -> Result<Summary, PolarsError> {
    let table = table(rows)?;
    let sums = table
        .group_by_stable(["source"])?
        .select(["tokens", "generated", "clipped", "one"]);
    #[expect(
        deprecated,
        reason = "its successor needs the lazy engine, which is not compiled in"
    )]
    let sums = sums.sum()?;
    let names = sums.column("source")?.str()?.clone();
    let [tokens, generated, clipped, ones] =
        ["tokens_sum", "generated_sum", "clipped_sum", "one_sum"]
            .map(|name| sums.column(name).and_then(Column::u64).cloned());
    let (tokens, generated, clipped, ones) = (tokens?, generated?, clipped?, ones?);
    let at = |column: &ChunkedArray<UInt64Type>, row| column.get(row).unwrap_or(0) as usize;
    let sources = (0..sums.height())
        .map(|row| SourceSummary {
            source: names.get(row).unwrap_or_default().to_owned(),
            rows: at(&ones, row),
            tokens: at(&tokens, row),
            generated_tokens: at(&generated, row),
            clipped: at(&clipped, row),
        })
        .collect();
    Ok(Summary {
        row_len: quantiles(table.column("tokens")?.u64()?)?,
        generated_len: quantiles(table.column("generated")?.u64()?)?,
        sources,
    })
}

fn table(rows: &[DatasetRow]) -> Result<DataFrame, PolarsError> {
    let sources: Vec<&str> = rows.iter().map(|row| row.source.as_str()).collect();
    let numbers = |number: fn(&DatasetRow) -> usize| -> Vec<u64> {
        rows.iter().map(|row| number(row) as u64).collect()
    };
    DataFrame::new(
        rows.len(),
        vec![
            Column::new("source".into(), sources),
            Column::new("tokens".into(), numbers(|row| row.tokens.ids.len())),
            Column::new(
                "generated".into(),
                numbers(|row| row.tokens.num_generated()),
            ),
            Column::new("clipped".into(), numbers(|row| usize::from(row.clipped))),
            Column::new("one".into(), numbers(|_| 1)),
        ],
    )
}

fn quantiles(lengths: &ChunkedArray<UInt64Type>) -> Result<LengthQuantiles, PolarsError> {
    let at = |share| -> Result<usize, PolarsError> {
        let value = lengths.quantile(share, QuantileMethod::Nearest)?;
        Ok(value.unwrap_or(0.0) as usize)
    };
    Ok(LengthQuantiles {
        min: at(0.0)?,
        median: at(0.5)?,
        p90: at(0.9)?,
        p99: at(0.99)?,
        max: at(1.0)?,
    })
}
