//! tau by category, for suites whose prompts name one.

use std::fmt::Write as _;

use super::svg::escape;
use super::tau_cell;
use crate::report::Entry;

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
            let figures = entry.by_category.get(place);
            let cell = figures.map_or(String::new(), |figures| {
                tau_cell(figures.tau, figures.tau_interval)
            });
            let _ = write!(table, "<td>{cell}</td>");
        }
        table.push_str("</tr>\n");
    }
    table.push_str("</table></div>");
    table
}
