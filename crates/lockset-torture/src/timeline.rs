//! A picture of a run: holders per client over time, faults as bands, violations in red.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::history::{History, Nanos};
use crate::holds::{Facts, Hold};
use crate::oracle::Verdict;

const LEFT: f64 = 90.0;
const WIDTH: f64 = 1600.0;
const TOP: f64 = 150.0;
const ROW: f64 = 12.0;
const COLOURS: [&str; 6] = ["#3b6ea5", "#4d9a6a", "#a5733b", "#7a5ca8", "#3ba5a0", "#8a8a3b"];

/// The picture as SVG.
pub fn svg(history: &History, verdict: &Verdict) -> String {
    let facts = Facts::of(history);
    let picture = Picture::new(history, &facts);
    let mut body = String::new();
    picture.draw_faults(&mut body);
    picture.draw_rows(&mut body);
    picture.draw_findings(&mut body, verdict);
    picture.draw_axis(&mut body);
    let (width, height) = (LEFT + WIDTH + 20.0, picture.height() + 40.0);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"10\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{body}</svg>\n"
    )
}

struct Picture<'a> {
    history: &'a History,
    facts: &'a Facts,
    begin: Nanos,
    end: Nanos,
    /// The rows: a client and a lock.
    rows: BTreeMap<(&'a str, &'a str), usize>,
}

impl<'a> Picture<'a> {
    fn new(history: &'a History, facts: &'a Facts) -> Self {
        let (begin, end) = history.span();
        let mut rows = BTreeMap::new();
        for hold in &facts.holds {
            rows.insert((hold.client(), hold.name.as_str()), 0);
        }
        rows.values_mut().enumerate().for_each(|(index, row)| *row = index);
        Self { history, facts, begin, end, rows }
    }

    fn x(&self, at: Nanos) -> f64 {
        let whole = (self.end - self.begin).max(1) as f64;
        LEFT + WIDTH * at.saturating_sub(self.begin) as f64 / whole
    }

    fn y(&self, hold: &Hold) -> f64 {
        let row = self.rows[&(hold.client(), hold.name.as_str())];
        TOP + ROW * row as f64
    }

    fn height(&self) -> f64 {
        TOP + ROW * self.rows.len() as f64
    }

    fn draw_faults(&self, body: &mut String) {
        for fault in &self.facts.faults {
            let (x, height) = (self.x(fault.begin), self.height() - TOP);
            let width = (self.x(fault.end) - x).max(1.0);
            let (name, target) = (&fault.fault, &fault.target);
            write!(
                body,
                "<rect x=\"{x:.1}\" y=\"{TOP}\" width=\"{width:.1}\" height=\"{height}\" \
                 fill=\"#f2d9a0\" fill-opacity=\"0.6\"><title>{name}: {target}</title></rect>\n\
                 <text transform=\"translate({:.1},{}) rotate(-60)\">{name}</text>\n",
                x + 4.0,
                TOP - 6.0,
            )
            .unwrap();
        }
        if let Some(quiet) = self.history.quiet() {
            let (x, bottom) = (self.x(quiet), self.height());
            writeln!(
                body,
                "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{bottom}\" \
                 stroke=\"#888\" stroke-dasharray=\"4\"/>",
            )
            .unwrap();
        }
    }

    fn draw_rows(&self, body: &mut String) {
        for ((client, name), row) in &self.rows {
            let y = TOP + ROW * *row as f64 + ROW - 3.0;
            writeln!(body, "<text x=\"8\" y=\"{y}\">{client} {name}</text>").unwrap();
        }
        let names: Vec<&str> = self.facts.by_name().into_keys().collect();
        for hold in self.facts.holds.iter().filter(|hold| hold.is_belief()) {
            let colour = names.iter().position(|name| *name == hold.name).unwrap_or(0);
            let colour = COLOURS[colour % COLOURS.len()];
            let (x, y) = (self.x(hold.entered), self.y(hold) + 1.0);
            let width = (self.x(hold.believed_until) - x).max(0.5);
            writeln!(
                body,
                "<rect x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"{}\" fill=\"{colour}\"/>",
                ROW - 2.0,
            )
            .unwrap();
        }
    }

    fn draw_findings(&self, body: &mut String, verdict: &Verdict) {
        for finding in &verdict.findings {
            let (x, bottom) = (self.x(finding.at), self.height());
            let colour = if finding.exception.is_some() { "#e08a00" } else { "#d00000" };
            writeln!(
                body,
                "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{bottom}\" stroke=\"{colour}\" \
                 stroke-width=\"2\"><title>{}</title></line>",
                finding.text.replace('<', "&lt;"),
            )
            .unwrap();
        }
    }

    fn draw_axis(&self, body: &mut String) {
        let seconds = (self.end - self.begin) / 1_000_000_000;
        let every = (seconds / 20).max(1);
        for second in (0..=seconds).step_by(every as usize) {
            let x = self.x(self.begin + second * 1_000_000_000);
            let y = self.height() + 16.0;
            writeln!(body, "<text x=\"{x:.1}\" y=\"{y}\">{second} s</text>").unwrap();
        }
        let setup = self.history.setup();
        let title = format!("{}, seed {}, ttl {} ms", setup.engine, setup.seed, setup.ttl_ms);
        writeln!(body, "<text x=\"8\" y=\"16\" font-size=\"13\">{title}</text>").unwrap();
    }
}
