//! Standard output: data, and nothing else.

use super::exit::Failure;
use serde::Serialize;
use std::io::{self, Write};

/// Writes a text with a newline. Whoever read it may have gone: then this
/// program has done its work.
pub(super) fn line(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    let outcome = stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.write_all(b"\n"))
        .and_then(|()| stdout.flush());
    match outcome {
        Ok(()) => Ok(()),
        Err(e) => Err(failure(&e)),
    }
}

/// What a failed write to standard output means.
pub(super) fn failure(error: &io::Error) -> Failure {
    if error.kind() == io::ErrorKind::BrokenPipe {
        Failure::silent(0)
    } else {
        Failure::io("cannot write to standard output", error)
    }
}

/// Writes a value as JSON, for people and programs to read.
pub(super) fn json(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|e| Failure::io("cannot write as JSON", &e.into()))?;
    line(&text)
}

/// Writes a value as JSON in one line.
pub(super) fn json_line(value: &impl Serialize) -> Result<(), Failure> {
    let text =
        serde_json::to_string(value).map_err(|e| Failure::io("cannot write as JSON", &e.into()))?;
    line(&text)
}

/// How a column's cells stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// Rows under a heading, in aligned columns.
pub(super) fn table(heading: &[(&str, Align)], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        let cells = cells.map(|cell| cell.chars().count());
        cells.fold(heading[column].0.chars().count(), usize::max)
    };
    let widths: Vec<usize> = (0..heading.len()).map(width).collect();
    let names = heading.iter().map(|(name, _)| (*name).to_owned()).collect();
    let mut text = String::new();
    for row in std::iter::once(&names).chain(rows) {
        let mut line = String::new();
        for ((cell, width), (_, align)) in row.iter().zip(&widths).zip(heading) {
            match align {
                Align::Left => line.push_str(&format!("{cell:<width$}  ")),
                Align::Right => line.push_str(&format!("{cell:>width$}  ")),
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text.pop();
    text
}

/// Names and values, one a line, in two columns.
pub(super) fn pairs(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.chars().count()).max();
    let width = width.unwrap_or(0);
    let lines: Vec<String> = rows
        .iter()
        .map(|(name, value)| format!("{name:<width$}  {value}"))
        .collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let heading = [("NAME", Align::Left), ("N", Align::Right)];
        let rows = vec![
            vec!["jobs".to_owned(), "1".to_owned()],
            vec!["größer".to_owned(), "1000".to_owned()],
        ];
        let text = table(&heading, &rows);
        assert_eq!(text, "NAME       N\njobs       1\ngrößer  1000");
    }
}
