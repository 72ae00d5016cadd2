//! What was measured: every sample of an engine, kept as a CSV file that the page is made from.

use std::fmt::Write;
use std::path::Path;

use crate::measure::{median, spread};

/// One value of one round.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sample {
    pub(crate) series: Series,
    pub(crate) round: usize,
    pub(crate) value: f64,
    /// Others had the cores, too.
    pub(crate) disturbed: bool,
}

/// What a value is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Series {
    pub(crate) work: String,
    pub(crate) setting: String,
    pub(crate) size: u64,
    pub(crate) player: String,
    pub(crate) metric: String,
}

/// All samples of one engine, and the facts around them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Samples {
    /// Machine, versions, date: a name and a text each.
    pub(crate) facts: Vec<(String, String)>,
    /// What could not be measured, and why.
    pub(crate) notes: Vec<String>,
    pub(crate) all: Vec<Sample>,
}

/// The samples of one series, over the rounds.
#[derive(Debug)]
pub(crate) struct Values {
    pub(crate) rounds: Vec<(usize, f64)>,
    pub(crate) disturbed: usize,
}

const HEAD: &str = "work,setting,size,player,metric,round,value,disturbed";

impl Samples {
    pub(crate) fn fact(&mut self, name: &str, text: impl Into<String>) {
        self.facts.push((name.to_owned(), text.into()));
    }

    pub(crate) fn values(&self, series: &Series) -> Option<Values> {
        let found: Vec<&Sample> =
            self.all.iter().filter(|sample| sample.series == *series).collect();
        let rounds: Vec<(usize, f64)> = found.iter().map(|one| (one.round, one.value)).collect();
        let disturbed = found.iter().filter(|one| one.disturbed).count();
        (!rounds.is_empty()).then_some(Values { rounds, disturbed })
    }

    /// What `pick` says of the samples, each once, in the order of their first appearance.
    pub(crate) fn distinct<T: PartialEq>(
        &self,
        wanted: impl Fn(&Series) -> bool,
        pick: impl Fn(&Series) -> T,
    ) -> Vec<T> {
        let mut found = Vec::new();
        for sample in self.all.iter().filter(|sample| wanted(&sample.series)) {
            let one = pick(&sample.series);
            if !found.contains(&one) {
                found.push(one);
            }
        }
        found
    }

    pub(crate) fn to_csv(&self) -> String {
        let mut text = String::new();
        for (name, fact) in &self.facts {
            let _ = writeln!(text, "# {name}: {fact}");
        }
        for note in &self.notes {
            let _ = writeln!(text, "! {note}");
        }
        let _ = writeln!(text, "{HEAD}");
        for Sample { series, round, value, disturbed } in &self.all {
            let Series { work, setting, size, player, metric } = series;
            let _ = writeln!(
                text,
                "{work},{setting},{size},{player},{metric},{round},{value:.9e},{disturbed}"
            );
        }
        text
    }

    /// Lines that are not understood are of another version and left out.
    pub(crate) fn from_csv(text: &str) -> Self {
        let mut samples = Self::default();
        for line in text.lines() {
            if let Some((name, fact)) = line.strip_prefix("# ").and_then(|one| one.split_once(": "))
            {
                samples.fact(name, fact);
            } else if let Some(note) = line.strip_prefix("! ") {
                samples.notes.push(note.to_owned());
            } else if let Some(sample) = Sample::from_line(line) {
                samples.all.push(sample);
            }
        }
        samples
    }

    pub(crate) fn read(path: &Path) -> std::io::Result<Self> {
        Ok(Self::from_csv(&std::fs::read_to_string(path)?))
    }
}

impl Sample {
    fn from_line(line: &str) -> Option<Self> {
        let cells: Vec<&str> = line.split(',').collect();
        let [work, setting, size, player, metric, round, value, disturbed] = cells.as_slice()
        else {
            return None;
        };
        let series = Series {
            work: (*work).to_owned(),
            setting: (*setting).to_owned(),
            size: size.parse().ok()?,
            player: (*player).to_owned(),
            metric: (*metric).to_owned(),
        };
        let (round, value) = (round.parse().ok()?, value.parse().ok()?);
        Some(Self { series, round, value, disturbed: disturbed.parse().ok()? })
    }
}

impl Values {
    pub(crate) fn median(&self) -> f64 {
        median(self.rounds.iter().map(|(_, value)| *value))
    }

    pub(crate) fn spread(&self) -> f64 {
        spread(&self.rounds.iter().map(|(_, value)| *value).collect::<Vec<_>>())
    }

    /// The median of what these are to others, of the rounds that both have.
    pub(crate) fn ratio_to(&self, others: &Self) -> Option<f64> {
        let pairs = self.rounds.iter().filter_map(|(round, ours)| {
            let (_, theirs) = others.rounds.iter().find(|(other, _)| other == round)?;
            (*theirs != 0.0).then_some(ours / theirs)
        });
        let ratios: Vec<f64> = pairs.collect();
        (!ratios.is_empty()).then(|| median(ratios))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(player: &str, round: usize, value: f64, disturbed: bool) -> Sample {
        let series = Series {
            work: "uncontended".to_owned(),
            setting: "one core".to_owned(),
            size: 64,
            player: player.to_owned(),
            metric: "per_second".to_owned(),
        };
        Sample { series, round, value, disturbed }
    }

    #[test]
    fn samples_survive_their_file() {
        let samples = Samples {
            facts: vec![("machine".to_owned(), "2 cores: small".to_owned())],
            notes: vec!["x, y: not installed".to_owned()],
            all: vec![sample("Lockset", 0, 0.000_012_5, true), sample("rslock", 3, 7e4, false)],
        };
        assert_eq!(Samples::from_csv(&samples.to_csv()), samples);
    }

    #[test]
    fn ratios_are_of_rounds_that_both_have() {
        let all = vec![
            sample("Lockset", 0, 10.0, false),
            sample("Lockset", 1, 40.0, true),
            sample("Lockset", 2, 6.0, false),
            sample("rslock", 0, 5.0, false),
            sample("rslock", 1, 20.0, false),
        ];
        let samples = Samples { all, ..Samples::default() };
        let of = |player| samples.values(&sample(player, 0, 0.0, false).series).unwrap();
        assert_eq!(of("Lockset").ratio_to(&of("rslock")), Some(2.0));
        assert_eq!((of("Lockset").disturbed, of("Lockset").median()), (1, 10.0));
    }
}
