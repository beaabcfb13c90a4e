//! Plots as SVG.

use std::ops::Range;

pub use maud::Markup;
use maud::{PreEscaped, html};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use assay_schema::picture::ErrorPicture;

use super::number::{clipped, count, short};

/// The meaning of a colour, which the page's style sheet chooses.
#[derive(Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "named after the style sheet's variables")]
pub enum Tone {
    Ink,
    Rule,
    First,
    Second,
    Third,
    Bad,
    Faint,
}

impl Tone {
    fn stand_in(self) -> RGBColor {
        let n = self as u8 + 1;
        RGBColor(n, n, n)
    }

    /// The variable of the style sheet.
    pub fn variable(self) -> &'static str {
        match self {
            Tone::Ink => "--ink",
            Tone::Rule => "--rule",
            Tone::First => "--first",
            Tone::Second => "--second",
            Tone::Third => "--third",
            Tone::Bad => "--bad",
            Tone::Faint => "--faint",
        }
    }

    /// Rules that put the style's colours in the place of all stand-ins.
    pub fn rules() -> String {
        let tones = [Tone::Ink, Tone::Rule, Tone::First, Tone::Second, Tone::Third, Tone::Bad, Tone::Faint];
        let rule = |tone: Tone| {
            let RGBColor(n, ..) = tone.stand_in();
            let (hex, variable) = (format!("#{n:02X}{n:02X}{n:02X}"), tone.variable());
            format!("svg [fill=\"{hex}\"]{{fill:var({variable})}}svg [stroke=\"{hex}\"]{{stroke:var({variable})}}\n")
        };
        tones.map(rule).concat()
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

/// Pixels of a plot over the page's whole width, and of one among several.
const WIDE: u32 = 860;
const NARROW: u32 = 340;
const TEXT: u32 = 15;
/// Pixels that a character takes, about.
const CHARACTER: f64 = 6.6;

fn text_style(tone: Tone, h: HPos, v: VPos) -> TextStyle<'static> {
    ("sans-serif", TEXT).into_font().color(&tone.stand_in()).pos(Pos::new(h, v))
}

/// A figure with its caption; a plot that fails says why in its place.
fn figure(caption: &Markup, size: (u32, u32), draw: impl FnOnce(&Area) -> Drawn) -> Markup {
    let mut svg = String::new();
    let drawn = {
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        draw(&area).and_then(|()| area.present().map_err(Into::into))
    };
    html! {
        figure {
            @match drawn {
                Ok(()) => div.plot { (PreEscaped(svg)) },
                Err(error) => p.note { "This plot could not be drawn: " (clipped(&error.to_string())) },
            }
            figcaption { (caption) }
        }
    }
}

/// The colours of a plot, in words.
///
/// ```
/// use assay_report::plot::{Tone, key};
///
/// assert!(key(&[(Tone::Bad, "beyond the limit")]).into_string().contains("var(--bad)"));
/// ```
pub fn key(entries: &[(Tone, &str)]) -> Markup {
    html! {
        p.key {
            @for (tone, name) in entries {
                span { i style=(format!("background:var({})", tone.variable())) {} (name) } " "
            }
        }
    }
}

/// Values on one line of a [`strips`] plot.
pub struct Strip {
    /// The label before the bar.
    pub name: String,
    /// Shares of the limit, of which those beyond 1 are failures.
    pub shares: Vec<f64>,
}

/// One line a strip, a dot a value, on a logarithmic axis whose 1 is the limit. Values of 0 are not drawn but counted.
///
/// ```
/// use assay_report::plot::{Markup, Strip, strips};
/// use maud::html;
///
/// // A share that is NaN is drawn like one of ∞, at the upper end.
/// let strip = |share| Strip { name: "dlogits".into(), shares: vec![0.0, 0.25, share] };
/// let figure = |share: f64| -> Markup { strips(&[strip(share)], &html! { "error / limit" }) };
/// let drawn = [f64::NAN, f64::INFINITY].map(|share| figure(share).into_string());
/// assert!(drawn[0].contains("<svg") && drawn[0] == drawn[1]);
/// ```
pub fn strips(strips: &[Strip], caption: &Markup) -> Markup {
    const ROW: u32 = 24;
    // Shares below 1e-12 are as good as exact and would stretch the axis; a share of ∞, a value without an error, is
    // drawn at its upper end.
    const DRAWN: Range<f64> = 1e-12..1e12;
    let exact = |strip: &Strip| strip.shares.iter().filter(|share| **share < DRAWN.start).count();
    let drawn = |strip: &Strip| -> Vec<f64> {
        // `min` returns the other number for NaN, so that a share without a value is drawn like ∞.
        let above = strip.shares.iter().filter(|share| share.is_nan() || **share >= DRAWN.start);
        above.map(|share| share.min(DRAWN.end)).collect()
    };
    let all: Vec<f64> = strips.iter().flat_map(drawn).collect();
    // The axis ends at whole powers of ten, and has at least a decade on either side of the limit, 1.
    let low = all.iter().copied().fold(0.1, f64::min).log10().floor();
    let high = all.iter().copied().fold(2.0, f64::max).log10().ceil();
    let left = label_width(strips.iter().map(|strip| strip.name.as_str()));
    let rows = strips.len() as f64;
    figure(caption, (WIDE, ROW * strips.len() as u32 + 44), |area| {
        let mut chart = ChartBuilder::on(area)
            .margin_top(6)
            .margin_right(58)
            .x_label_area_size(32)
            .y_label_area_size(left)
            .build_cartesian_2d((10f64.powf(low)..10f64.powf(high)).log_scale(), 0.0..rows)?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .disable_y_axis()
            .x_labels(12)
            .bold_line_style(Tone::Rule.stand_in())
            .light_line_style(TRANSPARENT)
            .axis_style(Tone::Rule.stand_in())
            .label_style(text_style(Tone::Faint, HPos::Center, VPos::Top))
            .x_label_formatter(&|x| power_of_ten(*x))
            .draw()?;
        chart.draw_series(LineSeries::new([(1.0, 0.0), (1.0, rows)], Tone::Bad.stand_in().stroke_width(2)))?;
        for (i, strip) in strips.iter().enumerate() {
            // Plots count upwards, and the first strip is the topmost: its middle is half a row below the upper end.
            let y = rows - i as f64 - 0.5;
            let points = drawn(strip);
            // A crowd of dots is drawn more transparent, so that its density still shows.
            let crowd = 1.0 / (points.len() as f64).sqrt();
            chart.draw_series(points.iter().enumerate().map(|(k, &share)| {
                // Dots of one line stand a little apart, in turns.
                let y = y + 0.22 * ((k % 5) as f64 / 2.0 - 1.0);
                let tone = if share > 1.0 { Tone::Bad } else { Tone::First };
                Circle::new((share, y), 3, tone.stand_in().mix(crowd.clamp(0.4, 0.9)).filled())
            }))?;
            let at = chart.backend_coord(&(10f64.powf(low), y));
            let label = text_style(Tone::Ink, HPos::Right, VPos::Center);
            area.draw_text(&clipped(&strip.name), &label, (at.0 - 10, at.1))?;
            if exact(strip) > 0 {
                let at = chart.backend_coord(&(10f64.powf(high), y));
                let note = text_style(Tone::Faint, HPos::Left, VPos::Center);
                area.draw_text(&format!("+{} at 0", exact(strip)), &note, (at.0 + 4, at.1))?;
            }
        }
        Ok(())
    })
}

/// Draws where an output is wrong: a bar for each part of its axis, on a logarithmic scale whose line is the limit.
///
/// ```
/// use assay_report::plot::places;
/// use assay_schema::picture::{ErrorPicture, PictureAxis};
///
/// let picture = ErrorPicture {
///     output: "dlogits".into(),
///     problem: "1x2x4 f32".into(),
///     axis: PictureAxis::VocabularyEntry,
///     extent: 4,
///     places: 1,
///     error_over_limit: vec![Some(0.1), Some(0.2), None, Some(40.0)],
///     nonfinite: vec![2],
/// };
/// let figure = places(&picture).into_string();
/// assert!(figure.contains("<svg") && figure.contains("beyond the limit: 2 to 3"));
/// ```
pub fn places(picture: &ErrorPicture) -> Markup {
    // Errors below a hundredth of the limit are as good as none.
    const LOWEST: f64 = 1e-2;
    let cells = picture.filled();
    let largest = cells.iter().flatten().copied().filter(|x| x.is_finite()).fold(10.0, f64::max);
    let highest = 10f64.powf(largest.log10().ceil());
    let caption = html! {
        (clipped(&picture.caption())) "; " (picture.beyond_in_words()) ". The line is the limit."
        @if !picture.nonfinite.is_empty() { " Bars to the top are NaN or ∞." }
    };
    let (extent, places) = (picture.extent as f64, picture.places as f64);
    figure(&caption, (WIDE, 190), |area| {
        let mut chart = ChartBuilder::on(area)
            .margin_top(8)
            .margin_right(14)
            .x_label_area_size(26)
            .y_label_area_size(58)
            .build_cartesian_2d(0.0..extent, (LOWEST..highest).log_scale())?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(9)
            .y_labels(6)
            .bold_line_style(Tone::Rule.stand_in())
            .light_line_style(TRANSPARENT)
            .axis_style(Tone::Rule.stand_in())
            .label_style(text_style(Tone::Faint, HPos::Center, VPos::Top))
            .x_label_formatter(&|x| format!("{x:.0}"))
            .y_label_formatter(&|y| power_of_ten(*y))
            .draw()?;
        let bars = cells.iter().enumerate().filter_map(|(cell, error)| {
            let error = error.filter(|error| *error > LOWEST)?;
            let (from, to) = (cell as f64 * places, ((cell + 1) as f64 * places).min(extent));
            let tone = if error > 1.0 { Tone::Bad } else { Tone::First };
            Some(Rectangle::new([(from, LOWEST), (to, error.min(highest))], tone.stand_in().filled()))
        });
        chart.draw_series(bars)?;
        chart.draw_series(LineSeries::new([(0.0, 1.0), (extent, 1.0)], Tone::Ink.stand_in().stroke_width(1)))?;
        Ok(())
    })
}

/// One bar of parts, end to end.
pub struct Bar {
    /// The label before the bar.
    pub name: String,
    /// The lengths of the bar's parts.
    pub parts: Vec<(f64, Tone)>,
    /// The text after the bar.
    pub note: String,
}

impl Bar {
    /// Makes a bar of one part.
    pub fn single(name: impl Into<String>, value: f64, tone: Tone, note: impl Into<String>) -> Self {
        Self { name: name.into(), parts: vec![(value, tone)], note: note.into() }
    }

    fn end(&self) -> f64 {
        self.parts.iter().map(|(value, _)| value).sum()
    }
}

/// Horizontal bars from 0, and an upright line at `mark` where there is one.
///
/// ```
/// use assay_report::plot::{Bar, Tone, bars};
/// use maud::html;
///
/// let bar = Bar::single("native", 1.5, Tone::First, "1.50 ms");
/// assert!(bars(&[bar], Some(1.0), &html! { "a step" }).into_string().contains("1.50 ms"));
/// ```
pub fn bars(bars: &[Bar], mark: Option<f64>, caption: &Markup) -> Markup {
    const ROW: u32 = 26;
    // A value that was not measured has no bar; a length of 0 has one, with only its note.
    let bars: Vec<&Bar> = bars.iter().filter(|bar| bar.end().is_finite() && bar.end() >= 0.0).collect();
    let mark = mark.filter(|mark| mark.is_finite());
    let longest = bars.iter().map(|bar| bar.end()).chain(mark).fold(0.0, f64::max);
    if longest <= 0.0 {
        return html! {};
    }
    let left = label_width(bars.iter().map(|bar| bar.name.as_str()));
    let right = label_width(bars.iter().map(|bar| bar.note.as_str()));
    let rows = bars.len() as f64;
    figure(caption, (WIDE, ROW * bars.len() as u32 + 12), |area| {
        let mut chart = ChartBuilder::on(area)
            .margin_top(6)
            .margin_bottom(6)
            .margin_right(right)
            .y_label_area_size(left)
            .build_cartesian_2d(0.0..longest, 0.0..rows)?;
        for (i, bar) in bars.iter().enumerate() {
            // The first bar is the topmost.
            let y = rows - i as f64 - 0.5;
            let mut from = 0.0;
            // The parts of a bar lie end to end, each in its tone.
            for &(value, tone) in &bar.parts {
                let corners = [(from, y - 0.32), (from + value, y + 0.32)];
                chart.draw_series([Rectangle::new(corners, tone.stand_in().filled())])?;
                from += value;
            }
            let (begin, end) = (chart.backend_coord(&(0.0, y)), chart.backend_coord(&(from, y)));
            let label = text_style(Tone::Ink, HPos::Right, VPos::Center);
            area.draw_text(&clipped(&bar.name), &label, (begin.0 - 8, begin.1))?;
            let note = text_style(Tone::Ink, HPos::Left, VPos::Center);
            area.draw_text(&clipped(&bar.note), &note, (end.0 + 6, end.1))?;
        }
        if let Some(mark) = mark {
            chart.draw_series(LineSeries::new([(mark, 0.0), (mark, rows)], Tone::Ink.stand_in().stroke_width(1)))?;
        }
        Ok(())
    })
}

/// Draws the number of values in each bucket on a logarithmic axis, so that a single value still shows.
///
/// ```
/// use assay_report::plot::histogram;
/// use maud::html;
///
/// let labels = ["≤ 1".to_string(), "> 1".to_string()];
/// assert!(histogram(&labels, &[7, 1], &html! { "ulp" }).into_string().contains("<svg"));
/// ```
pub fn histogram(labels: &[String], counts: &[u64], caption: &Markup) -> Markup {
    // A logarithmic axis has no 0. It begins at ½, so that a single value has a bar of visible height.
    const FLOOR: f64 = 0.5;
    let most = counts.iter().copied().max().unwrap_or(0) as f64;
    let columns = counts.len() as f64;
    figure(caption, (NARROW, 190), |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(6)
            .margin_top(22)
            .x_label_area_size(24)
            .build_cartesian_2d(0.0..columns, (FLOOR..most.max(1.0) * 2.0).log_scale())?;
        for (i, (&n, label)) in counts.iter().zip(labels).enumerate() {
            let (from, to) = (i as f64 + 0.08, i as f64 + 0.92);
            let middle = i as f64 + 0.5;
            // The first bucket is of values that round right; its colour is that of a pass.
            let tone = if i == 0 { Tone::Third } else { Tone::First };
            let foot = chart.backend_coord(&(middle, FLOOR));
            if n > 0 {
                chart.draw_series([Rectangle::new([(from, FLOOR), (to, n as f64)], tone.stand_in().filled())])?;
                let top = chart.backend_coord(&(middle, n as f64));
                let style = text_style(Tone::Ink, HPos::Center, VPos::Bottom);
                area.draw_text(&count(n), &style, (top.0, top.1 - 3))?;
            }
            let style = text_style(Tone::Faint, HPos::Center, VPos::Top);
            area.draw_text(label, &style, (foot.0, foot.1 + 5))?;
        }
        let ends = [0.0, columns].map(|x| (x, FLOOR));
        chart.draw_series(LineSeries::new(ends, Tone::Rule.stand_in().stroke_width(1)))?;
        Ok(())
    })
}

/// A curve and its tone.
pub struct Curve {
    /// The tone of the curve.
    pub tone: Tone,
    /// The points of the curve, which is broken where a value is not finite.
    pub points: Vec<(f64, f64)>,
}

/// The scale of a vertical axis.
pub struct Axis {
    /// The function that formats the axis's numbers.
    pub format: fn(f64) -> String,
    /// Whether it begins at 0, so that heights compare as amounts do.
    pub from_zero: bool,
}

/// Curves over steps of training.
///
/// ```
/// use assay_report::number::short;
/// use assay_report::plot::{Axis, Curve, Tone, curves};
/// use maud::html;
///
/// let curve = Curve { tone: Tone::First, points: vec![(0.0, 1.0), (1.0, 0.5)] };
/// let axis = Axis { format: short, from_zero: true };
/// assert!(curves(&[curve], &axis, &html! { "loss" }).into_string().contains("<svg"));
/// ```
pub fn curves(curves: &[Curve], axis: &Axis, caption: &Markup) -> Markup {
    // A run that diverged has values that are not finite. The extents leave them out, and the curve breaks there.
    let finite = |(x, y): &&(f64, f64)| x.is_finite() && y.is_finite();
    let all = || curves.iter().flat_map(|curve| curve.points.iter().filter(finite));
    let Some(x) = extent(all().map(|(x, _)| *x)) else { return html! {} };
    let zero = axis.from_zero.then_some(0.0);
    let Some(y) = extent(all().map(|(_, y)| *y).chain(zero)) else { return html! {} };
    // A tick at 0 may be a rounding away from it.
    let nothing = 1e-9 * (y.end - y.start);
    figure(caption, (NARROW, 210), |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(8)
            .margin_right(14)
            .x_label_area_size(26)
            .y_label_area_size(58)
            .build_cartesian_2d(x, y)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(5)
            .y_labels(5)
            .bold_line_style(Tone::Rule.stand_in())
            .light_line_style(TRANSPARENT)
            .axis_style(Tone::Rule.stand_in())
            .label_style(text_style(Tone::Faint, HPos::Center, VPos::Top))
            .x_label_formatter(&|x| format!("{x:.0}"))
            .y_label_formatter(&|y| (axis.format)(if y.abs() < nothing { 0.0 } else { *y }))
            .draw()?;
        for Curve { tone, points } in curves {
            for run in points.split(|point| !finite(&point)) {
                let style = tone.stand_in().mix(0.85).stroke_width(2);
                chart.draw_series(LineSeries::new(run.iter().copied(), style))?;
            }
        }
        Ok(())
    })
}

/// Points of a [`dots`] plot.
pub struct Dots {
    /// The points, each with its tone; those whose height is not above 0 are drawn at the foot.
    pub points: Vec<(f64, f64, Tone)>,
}

/// Draws points over a linear axis, with a logarithmic one for their heights.
///
/// ```
/// use assay_report::plot::{Dots, Tone, dots};
/// use maud::html;
///
/// let points = Dots { points: vec![(-1.0, 1e-3, Tone::First), (-2.0, 0.0, Tone::Bad)] };
/// assert!(dots(&points, &html! { "a difference" }).into_string().contains("<circle"));
/// ```
pub fn dots(dots: &Dots, caption: &Markup) -> Markup {
    const FOOT: f64 = 1e-12;
    let finite: Vec<(f64, f64, Tone)> = dots
        .points
        .iter()
        .filter(|(x, y, _)| x.is_finite() && y.is_finite())
        .map(|&(x, y, tone)| (x, y.max(FOOT), tone))
        .collect();
    let Some(x) = extent(finite.iter().map(|(x, ..)| *x)) else { return html! {} };
    let heights = || finite.iter().map(|(_, y, _)| *y);
    // The axis ends at whole powers of ten.
    let low = 10_f64.powf(heights().fold(f64::INFINITY, f64::min).log10().floor());
    let high = 10_f64.powf(heights().fold(0.0, f64::max).log10().floor() + 1.0);
    figure(caption, (NARROW, 230), |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(8)
            .margin_right(14)
            .x_label_area_size(26)
            .y_label_area_size(58)
            .build_cartesian_2d(x, (low..high).log_scale())?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(5)
            .y_labels(6)
            .bold_line_style(Tone::Rule.stand_in())
            .light_line_style(TRANSPARENT)
            .axis_style(Tone::Rule.stand_in())
            .label_style(text_style(Tone::Faint, HPos::Center, VPos::Top))
            .x_label_formatter(&|x| short(*x))
            .y_label_formatter(&|y| if *y == 1.0 { "1".into() } else { power_of_ten(*y) })
            .draw()?;
        let crowd = (1.0 / (finite.len() as f64).sqrt()).clamp(0.4, 0.9);
        chart.draw_series(
            finite.iter().map(|&(x, y, tone)| Circle::new((x, y), 2, tone.stand_in().mix(crowd).filled())),
        )?;
        Ok(())
    })
}

/// The range of `values`, a little wider than nothing.
fn extent(values: impl Iterator<Item = f64>) -> Option<Range<f64>> {
    // A drawing of anything larger overflows on the way to pixels.
    const LARGEST: f64 = 1e100;
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
    if low < -LARGEST || high > LARGEST || low > high {
        return None;
    }
    let room = if high > low { 0.05 * (high - low) } else { low.abs().max(1.0) * 0.05 };
    Some(low - room..high + room)
}

/// Pixels that the longest label needs.
#[allow(clippy::cast_sign_loss, reason = "it is ≥ 0")]
fn label_width<'t>(labels: impl Iterator<Item = &'t str>) -> u32 {
    const MOST: f64 = 260.0;
    let longest = labels.map(|label| clipped(label).chars().count()).max().unwrap_or(0);
    (longest as f64).mul_add(CHARACTER, 18.0).min(MOST) as u32
}

/// `10⁻³`; 1 is the limit.
///
/// ```
/// # use assay_report::plot::power_of_ten;
/// assert_eq!([power_of_ten(1e-3), power_of_ten(1.0)], ["10⁻³", "limit"]);
/// ```
pub fn power_of_ten(x: f64) -> String {
    const DIGITS: [char; 10] = ['⁰', '¹', '²', '³', '⁴', '⁵', '⁶', '⁷', '⁸', '⁹'];
    let exponent = x.log10().round();
    if (x.log10() - exponent).abs() > 1e-9 {
        return short(x);
    }
    match exponent as i32 {
        0 => "limit".into(),
        exponent => {
            let digits = exponent.unsigned_abs().to_string();
            let raised = digits.bytes().map(|digit| DIGITS[usize::from(digit - b'0')]);
            let sign = if exponent < 0 { "⁻" } else { "" };
            format!("10{sign}{}", raised.collect::<String>())
        }
    }
}
