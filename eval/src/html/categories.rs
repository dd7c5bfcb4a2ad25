//! tau by category, for suites whose prompts name one.

use std::fmt::Write as _;

use super::svg::escape;
use crate::report::{CategoryFigures, Entry};

/// One row a category, one column a proposer that drafts; nothing without categories.
pub(super) fn table(entries: &[&Entry]) -> String {
    let entries: Vec<&&Entry> = entries.iter().filter(|entry| entry.gamma > 0).collect();
    let Some(first) = entries
        .first()
        .filter(|entry| !entry.by_category.is_empty())
    else {
        return String::new();
    };
    let mut table = String::from(
        "<h3>tau by category</h3>\n<div class=\"wide\"><table><tr><th>category</th><th>prompts</th>",
    );
    for entry in &entries {
        let _ = write!(table, "<th>{}</th>", escape(&entry.proposer));
    }
    table.push_str("</tr>\n");
    for (place, category) in first.by_category.iter().enumerate() {
        let name = escape(&category.category);
        let _ = write!(table, "<tr><td>{name}</td><td>{}</td>", category.prompts);
        for entry in &entries {
            let cell = entry.by_category.get(place).map_or(String::new(), cell);
            let _ = write!(table, "<td>{cell}</td>");
        }
        table.push_str("</tr>\n");
    }
    table.push_str("</table></div>");
    table
}

fn cell(figures: &CategoryFigures) -> String {
    let interval = figures.tau_interval.map_or(String::new(), |interval| {
        format!("<small>{:.2}-{:.2}</small>", interval.low, interval.high)
    });
    format!("<b>{:.2}</b> {interval}", figures.tau)
}
