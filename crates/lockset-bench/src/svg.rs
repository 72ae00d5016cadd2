//! Plots: lines over a logarithmic axis, as SVG without any library.

use std::fmt::Write;

/// One line of a plot.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) title: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// A plot of lines; both axes are logarithmic.
#[derive(Debug)]
pub(crate) struct Plot {
    pub(crate) title: String,
    pub(crate) x: &'static str,
    pub(crate) y: &'static str,
    pub(crate) lines: Vec<Line>,
}

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 220.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 50.0;
/// Lockset comes first and has the strongest colour; the floor, if any, is grey.
const COLOURS: [&str; 12] = [
    "#c1121f", "#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf",
    "#ff7f0e", "#003f5c", "#6b8e23", "#708090",
];
const FLOOR: &str = "#888888";

impl Plot {
    pub(crate) fn draw(&self) -> String {
        let mut svg = String::new();
        let _ = writeln!(
            svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>"
        );
        text(&mut svg, (LEFT, 22.0), "start", &self.title, "font-size=\"15\"");
        let plane = Plane::around(self.lines.iter().flat_map(|line| &line.points));
        plane.axes(&mut svg, self.x, self.y);
        let mut colours = COLOURS.iter().cycle();
        for (place, line) in self.lines.iter().enumerate() {
            let is_floor = line.title.starts_with("floor");
            let colour = if is_floor { FLOOR } else { colours.next().copied().unwrap_or(FLOOR) };
            let width = if place == 0 { 3.0 } else { 1.5 };
            plane.line(&mut svg, line, colour, width);
            let y = TOP + 10.0 + 18.0 * place as f64;
            let x = WIDTH - RIGHT + 15.0;
            let _ = writeln!(
                svg,
                "<line x1=\"{x}\" y1=\"{y}\" x2=\"{}\" y2=\"{y}\" stroke=\"{colour}\" \
                 stroke-width=\"{width}\"/>",
                x + 20.0
            );
            text(&mut svg, (x + 26.0, y + 4.0), "start", &line.title, "");
        }
        svg.push_str("</svg>\n");
        svg
    }
}

/// The logarithms of what is shown.
struct Plane {
    x: (f64, f64),
    y: (f64, f64),
}

impl Plane {
    fn around<'a>(points: impl Iterator<Item = &'a (f64, f64)> + Clone) -> Self {
        let range = |values: &mut dyn Iterator<Item = f64>| {
            let (low, high) = values
                .filter(|value| *value > 0.0)
                .map(f64::log10)
                .fold((f64::MAX, f64::MIN), |(low, high), one| (low.min(one), high.max(one)));
            match low <= high {
                // A range that is empty would divide by zero.
                true => (low - 0.05, high.max(low + 0.3) + 0.05),
                false => (0.0, 1.0),
            }
        };
        let x = range(&mut points.clone().map(|(x, _)| *x));
        Self { x, y: range(&mut points.map(|(_, y)| *y)) }
    }

    fn at(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let part = |value: f64, (low, high): (f64, f64)| (value.log10() - low) / (high - low);
        let wide = part(x, self.x) * (WIDTH - LEFT - RIGHT);
        (LEFT + wide, HEIGHT - BOTTOM - part(y, self.y) * (HEIGHT - TOP - BOTTOM))
    }

    fn line(&self, svg: &mut String, line: &Line, colour: &str, width: f64) {
        let visible = line.points.iter().filter(|(x, y)| *x > 0.0 && *y > 0.0);
        let places: Vec<(f64, f64)> = visible.map(|point| self.at(*point)).collect();
        let path: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\"/>",
            path.join(" ")
        );
        for (x, y) in places {
            let _ =
                writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>");
        }
    }

    /// A grid line for 1, 2 and 5 of each power of ten that is in sight.
    fn axes(&self, svg: &mut String, x_title: &str, y_title: &str) {
        for value in ticks(self.x) {
            let (x, _) = self.at((value, 1.0));
            rule(svg, (x, TOP), (x, HEIGHT - BOTTOM));
            text(svg, (x, HEIGHT - BOTTOM + 16.0), "middle", &short(value), "");
        }
        for value in ticks(self.y) {
            let (_, y) = self.at((1.0, value));
            rule(svg, (LEFT, y), (WIDTH - RIGHT, y));
            text(svg, (LEFT - 6.0, y + 4.0), "end", &short(value), "");
        }
        let middle = LEFT + (WIDTH - LEFT - RIGHT) / 2.0;
        text(svg, (middle, HEIGHT - 12.0), "middle", x_title, "");
        let turned = format!("transform=\"rotate(-90 16 {0})\"", HEIGHT / 2.0);
        text(svg, (16.0, HEIGHT / 2.0), "middle", y_title, &turned);
    }
}

fn ticks((low, high): (f64, f64)) -> Vec<f64> {
    let decades = low.floor() as i32..=high.ceil() as i32;
    let all: Vec<f64> = decades
        .flat_map(|decade| [1.0, 2.0, 5.0].map(|digit| digit * 10_f64.powi(decade)))
        .filter(|value| (low..=high).contains(&value.log10()))
        .collect();
    match all.len() > 12 {
        true => all.into_iter().filter(|value| value.log10().fract().abs() < 1e-9).collect(),
        false => all,
    }
}

/// 20000 as `20k`.
fn short(value: f64) -> String {
    match value {
        value if value >= 1e6 => format!("{}M", round(value / 1e6)),
        value if value >= 1e3 => format!("{}k", round(value / 1e3)),
        value => round(value),
    }
}

fn round(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn rule(svg: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
    let _ = writeln!(
        svg,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"#ddd\"/>"
    );
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, text: &str, more: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" {more}>{text}</text>"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every element that is opened is closed, attributes are quoted, text is escaped.
    fn assert_well_formed(svg: &str) {
        let mut open = Vec::new();
        let mut rest = svg;
        while let Some(start) = rest.find('<') {
            assert!(!rest[..start].contains('>'), "a bare > in {}", &rest[..start]);
            let end = start + rest[start..].find('>').expect("a tag ends");
            let tag = &rest[start + 1..end];
            assert_eq!(tag.matches('"').count() % 2, 0, "quotes of {tag}");
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name));
            } else if !tag.ends_with('/') {
                open.push(tag.split_whitespace().next().unwrap());
            }
            rest = &rest[end + 1..];
        }
        assert!(open.is_empty(), "never closed: {open:?}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    fn plot(lines: Vec<Line>) -> Plot {
        Plot { title: "a < b & c > d".to_owned(), x: "tasks", y: "per second", lines }
    }

    #[test]
    fn plots_are_well_formed() {
        let line = |title: &str, points: &[(f64, f64)]| Line {
            title: title.to_owned(),
            points: points.to_vec(),
        };
        let svg = plot(vec![
            line("Lockset", &[(1.0, 900.0), (16.0, 2e4), (256.0, 7e5)]),
            line("floor", &[(1.0, 1e3)]),
            line("none", &[]),
            line("zero", &[(0.0, 0.0)]),
        ])
        .draw();
        assert_well_formed(&svg);
        assert_eq!(svg.matches("<polyline").count(), 4);
    }

    #[test]
    fn a_plot_of_nothing_or_of_one_value_is_well_formed() {
        assert_well_formed(&plot(Vec::new()).draw());
        let flat = vec![(1.0, 5.0), (2.0, 5.0)];
        assert_well_formed(&plot(vec![Line { title: "x".to_owned(), points: flat }]).draw());
    }

    #[test]
    #[should_panic(expected = "never closed")]
    fn the_check_of_plots_can_fail() {
        assert_well_formed("<svg><text>");
    }

    #[test]
    fn values_are_written_short() {
        assert_eq!([20_000.0, 1.5e6, 0.25, 3.0].map(short), ["20k", "1.5M", "0.25", "3"]);
    }
}
