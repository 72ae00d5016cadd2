//! The page and its plots, from the samples of all engines.

use std::fmt::Write;
use std::path::Path;

use super::engines::ENGINES;
use super::players::OURS;
use super::samples::{Samples, Series, Values};
use super::works::{DRAIN, FAIRNESS, FROZEN, HOLDING, PERCENTILES, RECOVERY, UNCONTENDED, WAITING};
use crate::measure::slope;
use crate::svg::{Line, Plot};
use crate::table::{micros, per_second};

/// A metric as it is shown.
struct Shown {
    work: &'static str,
    size: &'static str,
    metric: &'static str,
    title: String,
    unit: Unit,
    better: Better,
}

#[derive(Clone, Copy)]
enum Unit {
    PerSecond,
    Micros,
    Seconds,
    Share,
    Bytes,
    Number,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Better {
    More,
    Less,
}

use Better::{Less, More};
use Unit::{Bytes, Micros, Number, PerSecond, Seconds, Share};

/// Metric, title, unit, direction.
type Column = (&'static str, &'static str, Unit, Better);

/// Each work with its title, what its size is, and what is shown of it.
const SHOWN: &[(&str, &str, &str, &[Column])] = &[
    (
        UNCONTENDED,
        "Uncontended",
        "tasks",
        &[
            ("per_second", "cycles per second", PerSecond, More),
            ("client_cpu", "client CPU per cycle", Micros, Less),
            ("server_cpu", "server CPU per cycle", Micros, Less),
        ],
    ),
    (
        DRAIN,
        "A line of waiters",
        "waiters",
        &[
            ("per_second", "grants per second", PerSecond, More),
            ("p50", "hand-off, p50", Micros, Less),
            ("p99", "hand-off, p99", Micros, Less),
            ("client_cpu", "client CPU per grant", Micros, Less),
            ("server_cpu", "server CPU per grant", Micros, Less),
            ("requests", "requests to the server per grant", Number, Less),
        ],
    ),
    (
        FAIRNESS,
        "Fairness",
        "tasks",
        &[
            ("jain", "Jain's index of the grants of each task", Number, More),
            ("per_second", "grants per second meanwhile", PerSecond, More),
        ],
    ),
    (
        WAITING,
        "Waiting in ten processes",
        "waiters",
        &[
            ("requests", "requests per second", PerSecond, Less),
            ("received", "bytes that the server receives per second", Bytes, Less),
            ("server_cpu", "server, share of a core", Share, Less),
            ("client_cpu", "clients, share of a core", Share, Less),
            ("client_bytes", "client memory per waiter", Bytes, Less),
            ("server_bytes", "server memory per waiter", Bytes, Less),
        ],
    ),
    (
        HOLDING,
        "Holding",
        "locks",
        &[
            ("take", "time to take each, many side by side", Micros, Less),
            ("requests", "requests per second", PerSecond, Less),
            ("received", "bytes that the server receives per second", Bytes, Less),
            ("server_cpu", "server, share of a core", Share, Less),
            ("client_cpu", "client, share of a core", Share, Less),
            ("client_bytes", "client memory per lock", Bytes, Less),
            ("server_bytes", "server memory per lock", Bytes, Less),
        ],
    ),
    (
        RECOVERY,
        "Recovery",
        "s lease",
        &[("seconds", "from SIGKILL to the next grant", Seconds, Less)],
    ),
    (
        FROZEN,
        "One of five nodes frozen",
        "tasks",
        &[("per_second", "cycles per second", PerSecond, More)],
    ),
];

/// All that is shown, in order.
fn all_shown() -> Vec<Shown> {
    let of_work = |(work, about, size, columns): &(&'static str, &str, &'static str, &[Column])| {
        let shown = columns.iter().map(|(metric, title, unit, better)| Shown {
            work,
            size,
            metric,
            title: format!("{about}: {title}"),
            unit: *unit,
            better: *better,
        });
        shown.collect::<Vec<_>>()
    };
    SHOWN.iter().flat_map(of_work).collect()
}

/// A peer that is this much better is said to win; less is within what rounds differ.
const WINS: f64 = 0.97;

pub(crate) fn write(folder: &Path) -> std::io::Result<()> {
    let plots = folder.join("plots");
    std::fs::create_dir_all(&plots)?;
    let mut page = String::from(INTRODUCTION);
    let mut sections = String::new();
    for engine in ENGINES {
        let Ok(samples) = Samples::read(&folder.join(format!("results/{}.csv", engine.name)))
        else {
            let _ = writeln!(page, "* {}: not measured", engine.name);
            continue;
        };
        let _ = writeln!(page, "* [{0}](#{0}): {1}", engine.name, fact(&samples, "began"));
        section(&mut sections, engine.name, &samples);
        for (name, plot) in plots_of(engine.name, &samples) {
            let file = format!("{}-{name}.svg", engine.name);
            std::fs::write(plots.join(&file), plot.draw())?;
            let _ = writeln!(sections, "![{}](plots/{file})\n", plot.title);
        }
    }
    page.push_str(&sections);
    page.push_str(&targets(folder));
    std::fs::write(folder.join("REPORT.md"), page)
}

const INTRODUCTION: &str = "# Benchmark report

Written by `cargo xtask bench`; docs/benchmarks.md says what is measured and how. Every player is a
process of its own that is told what to do by the same few orders. Players take turns within a
round; a cell is the median over the rounds and, behind ±, the spread of the middle half.

The number in parentheses says how many times better Lockset is, as the median of the ratios within
each round. **Bold** means that this peer is better than Lockset; a floor always should be. A `~`
marks cells of which more than half of the rounds were disturbed: other processes or the host had
more than a tenth of the cores in use. Times belong to the machine; ratios of the same rounds are
what can be compared.

";

fn fact<'a>(samples: &'a Samples, name: &str) -> &'a str {
    samples.facts.iter().find(|(one, _)| one == name).map_or("unknown", |(_, text)| text)
}

fn section(page: &mut String, engine: &str, samples: &Samples) {
    let _ = writeln!(page, "\n## {engine}\n");
    for (name, text) in &samples.facts {
        let _ = writeln!(page, "* {name}: {text}");
    }
    let disturbed = samples.all.iter().filter(|one| one.disturbed).count();
    let part = 100 * disturbed / samples.all.len().max(1);
    let _ = writeln!(page, "* disturbed: {part} % of all samples");
    for note in &samples.notes {
        let _ = writeln!(page, "* {note}");
    }
    wins(page, samples);
    for shown in &all_shown() {
        let of_metric = |one: &Series| one.work == shown.work && one.metric == shown.metric;
        for setting in samples.distinct(of_metric, |one| one.setting.clone()) {
            table(page, samples, shown, &setting);
        }
    }
    growth(page, samples);
}

/// Where a peer wins, before anything else.
fn wins(page: &mut String, samples: &Samples) {
    let mut lines = Vec::new();
    for shown in &all_shown() {
        let wanted = |one: &Series| {
            one.work == shown.work && one.metric == shown.metric && is_peer(&one.player)
        };
        for series in samples.distinct(wanted, Clone::clone) {
            if let Some(factor) = factor(samples, &series, shown).filter(|one| *one < WINS) {
                let Series { setting, size, player, .. } = &series;
                let place = format!("{size} {}, {setting}", shown.size);
                lines.push((format!("{} ({place})", shown.title), format!("{player} {factor:.2}")));
            }
        }
    }
    let _ = writeln!(page, "\n### Where a peer wins\n");
    if lines.is_empty() {
        let _ = writeln!(page, "Nowhere in this run.");
    }
    let mut titles: Vec<&String> = lines.iter().map(|(title, _)| title).collect();
    titles.dedup();
    for title in titles {
        let of_title = lines.iter().filter(|(one, _)| one == title);
        let peers: Vec<&str> = of_title.map(|(_, peer)| peer.as_str()).collect();
        let _ = writeln!(page, "* {title}: {}", peers.join(", "));
    }
}

fn is_peer(player: &str) -> bool {
    player != OURS && !player.starts_with("floor")
}

/// How many times better Lockset is, in the same rounds.
fn factor(samples: &Samples, series: &Series, shown: &Shown) -> Option<f64> {
    let ours = samples.values(&Series { player: OURS.to_owned(), ..series.clone() })?;
    let theirs = samples.values(series)?;
    match shown.better {
        Better::More => ours.ratio_to(&theirs),
        Better::Less => theirs.ratio_to(&ours),
    }
}

fn table(page: &mut String, samples: &Samples, shown: &Shown, setting: &str) {
    let wanted = |one: &Series| {
        one.work == shown.work && one.metric == shown.metric && one.setting == setting
    };
    let sizes = samples.distinct(wanted, |one| one.size);
    let _ = writeln!(page, "\n### {}\n\n{setting}\n", shown.title);
    let heads: Vec<String> = sizes.iter().map(|size| format!("{size} {}", shown.size)).collect();
    let _ = writeln!(page, "| | {} |\n|---|{}", heads.join(" | "), "---|".repeat(sizes.len()));
    for player in samples.distinct(wanted, |one| one.player.clone()) {
        let cells: Vec<String> = sizes
            .iter()
            .map(|size| {
                let series = Series {
                    work: shown.work.to_owned(),
                    setting: setting.to_owned(),
                    size: *size,
                    player: player.clone(),
                    metric: shown.metric.to_owned(),
                };
                cell(samples, &series, shown)
            })
            .collect();
        let _ = writeln!(page, "| {player} | {} |", cells.join(" | "));
    }
}

fn cell(samples: &Samples, series: &Series, shown: &Shown) -> String {
    let Some(values) = samples.values(series) else { return "–".to_owned() };
    let mut text = shown.unit.text(values.median());
    if values.rounds.len() > 1 {
        let _ = write!(text, " ± {:.0} %", values.spread() * 100.0);
    }
    if series.player != OURS
        && let Some(factor) = factor(samples, series, shown)
    {
        // As many digits as decide.
        let factor_text =
            if factor < 10.0 { format!("{factor:.2}") } else { format!("{factor:.0}") };
        let _ = match factor < 1.0 && is_peer(&series.player) {
            true => write!(text, " (**{factor_text}**)"),
            false => write!(text, " ({factor_text})"),
        };
    }
    if 2 * values.disturbed > values.rounds.len() {
        text.push('~');
    }
    text
}

impl Unit {
    fn text(self, value: f64) -> String {
        match self {
            Self::PerSecond => per_second(value),
            Self::Micros => micros(value),
            Self::Seconds => format!("{value:.2} s"),
            Self::Share => format!("{:.2} %", value * 100.0),
            Self::Bytes => format!("{value:.0} B"),
            Self::Number => format!("{value:.2}"),
        }
    }
}

/// How costs grow with the size: the exponent, by player.
fn growth(page: &mut String, samples: &Samples) {
    let rows = [
        (UNCONTENDED, "client_cpu", "client CPU per cycle over tasks"),
        (UNCONTENDED, "server_cpu", "server CPU per cycle over tasks"),
        (DRAIN, "p50", "hand-off p50 over waiters"),
        (DRAIN, "requests", "requests per grant over waiters"),
        (DRAIN, "server_cpu", "server CPU per grant over waiters"),
        (WAITING, "requests", "requests per second over waiters"),
        (HOLDING, "take", "time to take each over locks held"),
        (HOLDING, "requests", "requests per second over locks held"),
    ];
    let _ = writeln!(
        page,
        "\n### Growth\n\nThe exponent k of size^k that fits the medians best: 0 is flat, 1 is \
         linear. Costs per cycle and per grant should be flat, requests per second at most linear.\n"
    );
    let players = samples.distinct(|_| true, |one| one.player.clone());
    let _ = writeln!(page, "| | {} |\n|---|{}", players.join(" | "), "---|".repeat(players.len()));
    for (work, metric, title) in rows {
        let of_metric = |one: &Series| one.work == work && one.metric == metric;
        for setting in samples.distinct(of_metric, |one| one.setting.clone()) {
            let cells: Vec<String> = players
                .iter()
                .map(|player| {
                    let points = points(samples, (work, &setting, metric), player);
                    let points: Vec<_> = points.into_iter().filter(|(_, y)| *y > 0.0).collect();
                    if points.len() < 2 {
                        "–".to_owned()
                    } else {
                        format!("{:.2}", slope(&points))
                    }
                })
                .collect();
            let _ = writeln!(page, "| {title}; {setting} | {} |", cells.join(" | "));
        }
    }
}

/// The medians of a player over the sizes.
fn points(
    samples: &Samples,
    (work, setting, metric): (&str, &str, &str),
    player: &str,
) -> Vec<(f64, f64)> {
    let wanted = |one: &Series| {
        one.work == work && one.setting == setting && one.metric == metric && one.player == player
    };
    let all = samples.distinct(wanted, Clone::clone);
    let medians = all.iter().filter_map(|series| {
        let values: Values = samples.values(series)?;
        Some((series.size as f64, values.median()))
    });
    medians.collect()
}

fn plots_of(engine: &str, samples: &Samples) -> Vec<(&'static str, Plot)> {
    let players = samples.distinct(|_| true, |one| one.player.clone());
    let lines = |points: &dyn Fn(&str) -> Vec<(f64, f64)>| -> Vec<Line> {
        let all =
            players.iter().map(|player| Line { title: player.clone(), points: points(player) });
        all.filter(|line| !line.points.is_empty()).collect()
    };
    let over = |work: &'static str, setting: &'static str, metric: &'static str| {
        lines(&|player| points(samples, (work, setting, metric), player))
    };
    let plot = |title: &str, x, y, lines| Plot { title: format!("{engine}: {title}"), x, y, lines };
    let one_core = "all on one core";
    let distribution = lines(&|player| distribution(samples, player));
    let grants = lines(&|player| shares(samples, player));
    let all = [
        (
            "throughput",
            plot(
                "uncontended, all on one core",
                "tasks",
                "cycles per second",
                over(UNCONTENDED, one_core, "per_second"),
            ),
        ),
        (
            "hand-off",
            plot(
                "hand-off among 128 waiters of one process, one core",
                "1 / (1 − percentile)",
                "µs",
                distribution,
            ),
        ),
        (
            "requests",
            plot(
                "requests per grant, one process",
                "waiters",
                "requests per grant",
                over(DRAIN, "all cores; one process", "requests"),
            ),
        ),
        (
            "waiting",
            plot(
                "what waiting costs, in ten processes",
                "waiters",
                "requests per second",
                over(WAITING, "all cores", "requests"),
            ),
        ),
        ("fairness", plot("fairness", "rank of the task", "grants", grants)),
    ];
    all.into_iter().filter(|(_, plot)| !plot.lines.is_empty()).collect()
}

/// Hand-offs of one process on one core, percentile by percentile.
fn distribution(samples: &Samples, player: &str) -> Vec<(f64, f64)> {
    let series = |metric: &str| Series {
        work: DRAIN.to_owned(),
        setting: "all on one core; one process".to_owned(),
        size: 128,
        player: player.to_owned(),
        metric: metric.to_owned(),
    };
    let points = PERCENTILES.iter().filter_map(|(name, part)| {
        let values = samples.values(&series(name))?;
        Some((1.0 / (1.0 - part), values.median() * 1e6))
    });
    points.collect()
}

/// The grants of each task, the luckiest first.
fn shares(samples: &Samples, player: &str) -> Vec<(f64, f64)> {
    let grants = samples.all.iter().filter(|one| {
        one.series.work == FAIRNESS && one.series.metric == "grants" && one.series.player == player
    });
    grants.map(|one| (one.round as f64, one.value)).collect()
}

/// The tables with targets, as the engines' own benchmarks printed them last.
fn targets(folder: &Path) -> String {
    let mut text = String::new();
    let mut files: Vec<_> =
        std::fs::read_dir(folder.join("targets")).into_iter().flatten().flatten().collect();
    files.sort_by_key(std::fs::DirEntry::file_name);
    for file in files {
        let name = file.file_name().to_string_lossy().trim_end_matches(".md").to_owned();
        let table = std::fs::read_to_string(file.path()).unwrap_or_default();
        let _ = writeln!(text, "\n## Targets: {name}\n\n{table}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::samples::Sample;
    use super::*;

    fn samples(rates: &[(&str, f64)]) -> Samples {
        let mut samples = Samples::default();
        for (player, rate) in rates {
            for round in 0..3 {
                let series = Series {
                    work: UNCONTENDED.to_owned(),
                    setting: "all on one core".to_owned(),
                    size: 64,
                    player: (*player).to_owned(),
                    metric: "per_second".to_owned(),
                };
                let value = rate * (1 + round) as f64;
                samples.all.push(Sample { series, round, value, disturbed: round > 0 });
            }
        }
        samples
    }

    #[test]
    fn a_peer_that_wins_is_named() {
        let mut page = String::new();
        let rates = [(OURS, 100.0), ("fast", 125.0), ("slow", 50.0), ("floor: x", 900.0)];
        section(&mut page, "redis", &samples(&rates));
        let wins: Vec<&str> =
            page.lines().filter(|line| line.starts_with("* Uncontended")).collect();
        assert_eq!(wins.len(), 1, "{page}");
        assert!(wins[0].contains("fast 0.80") && !wins[0].contains("slow"));
        assert!(page.contains("(**0.80**)~") && page.contains("(2.00)~"), "{page}");
    }

    #[test]
    fn a_run_without_a_winner_says_so() {
        let mut page = String::new();
        wins(&mut page, &samples(&[(OURS, 100.0), ("slow", 50.0)]));
        assert!(page.contains("Nowhere"));
    }
}
