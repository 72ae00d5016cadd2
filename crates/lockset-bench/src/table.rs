//! The one table: work, ours, ratio, target, met.

use std::fmt;

/// What a ratio is to reach.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    AtLeast(f64),
    AtMost(f64),
    /// For the record.
    None,
}

#[derive(Debug)]
struct Row {
    work: String,
    ours: String,
    ratio: f64,
    target: Target,
}

/// Rows in the order in which they were measured.
#[derive(Debug, Default)]
pub(crate) struct Table(Vec<Row>);

impl Table {
    /// `ours` is the measured value itself, for orientation: it belongs to this machine.
    pub(crate) fn add(
        &mut self,
        work: impl Into<String>,
        ours: impl Into<String>,
        ratio: f64,
        target: Target,
    ) {
        let row = Row { work: work.into(), ours: ours.into(), ratio, target };
        // What was measured is seen even if a later row fails.
        eprintln!("  {}", row.cells().join(" | "));
        self.0.push(row);
    }
}

impl Row {
    fn cells(&self) -> [String; 5] {
        let (target, met) = match self.target {
            Target::AtLeast(least) => (format!("≥ {least}"), Some(self.ratio >= least)),
            Target::AtMost(most) => (format!("≤ {most}"), Some(self.ratio <= most)),
            Target::None => (String::new(), None),
        };
        let met = met.map_or("", |met| if met { "met" } else { "missed" });
        let ratio = match self.ratio {
            ratio if ratio.abs() < 0.1 => format!("{ratio:.4}"),
            ratio => format!("{ratio:.2}"),
        };
        [self.work.clone(), self.ours.clone(), ratio, target, met.to_owned()]
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = ["work", "ours", "ratio", "target", "met"].map(str::to_owned);
        let rows: Vec<[String; 5]> =
            std::iter::once(head).chain(self.0.iter().map(Row::cells)).collect();
        let width = |column: usize| {
            rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default()
        };
        let widths: [usize; 5] = std::array::from_fn(width);
        for (number, row) in rows.iter().enumerate() {
            let cells: Vec<String> =
                row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
            writeln!(f, "| {} |", cells.join(" | "))?;
            if number == 0 {
                let rules: Vec<String> = widths.iter().map(|width| "-".repeat(*width)).collect();
                writeln!(f, "| {} |", rules.join(" | "))?;
            }
        }
        Ok(())
    }
}

/// 0.0000213 seconds as `21.3 µs`.
pub(crate) fn micros(seconds: f64) -> String {
    format!("{:.1} µs", seconds * 1e6)
}

/// 21300 as `21.3k/s`.
pub(crate) fn per_second(rate: f64) -> String {
    if rate < 1e3 { format!("{rate:.1}/s") } else { format!("{:.1}k/s", rate / 1e3) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missed_target_is_called_missed() {
        let mut table = Table::default();
        table.add("fast", "1", 0.5, Target::AtLeast(0.4));
        table.add("slow", "2", 0.3, Target::AtLeast(0.4));
        table.add("late", "3", 3.0, Target::AtMost(2.5));
        table.add("other", "4", 3.0, Target::None);
        let text = table.to_string();
        let last = |work: &str| {
            let line = text.lines().find(|line| line.contains(work)).unwrap();
            line.split('|').rev().nth(1).unwrap().trim().to_owned()
        };
        assert_eq!([last("fast"), last("slow"), last("late")], ["met", "missed", "missed"]);
        assert_eq!(last("other"), "");
    }
}
