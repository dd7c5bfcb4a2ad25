//! A drawing that is put together element by element.

use std::fmt::{Display, Write as _};

/// Text as it may stand in a page.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            other => escaped.push(other),
        }
    }
    escaped
}

/// Where a text is anchored at its place.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

impl Anchor {
    fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Middle => "middle",
            Self::End => "end",
        }
    }
}

/// A drawing of a given size; coordinates grow to the right and down.
#[derive(Debug)]
pub(crate) struct Drawing {
    width: f64,
    height: f64,
    body: String,
}

impl Drawing {
    pub(crate) fn new(width: f64, height: f64) -> Self {
        Self {
            width,
            height,
            body: String::new(),
        }
    }

    pub(crate) fn text(&mut self, (x, y): (f64, f64), anchor: Anchor, text: &str) {
        self.labelled("", (x, y), anchor, text);
    }

    /// Text that stands back.
    pub(crate) fn soft(&mut self, (x, y): (f64, f64), anchor: Anchor, text: &str) {
        self.labelled(" class=\"soft\"", (x, y), anchor, text);
    }

    fn labelled(&mut self, class: &str, (x, y): (f64, f64), anchor: Anchor, text: &str) {
        let (anchor, text) = (anchor.name(), escape(text));
        self.add(format_args!(
            "<text{class} x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>"
        ));
    }

    pub(crate) fn axis(&mut self, from: (f64, f64), to: (f64, f64)) {
        self.add(format_args!(
            "<line class=\"axis\" x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\"/>",
            from.0, from.1, to.0, to.1
        ));
    }

    pub(crate) fn line(&mut self, points: &[(f64, f64)], colour: &str, width: f64) {
        let mut path = String::new();
        for (x, y) in points {
            let _ = write!(path, "{x:.1},{y:.1} ");
        }
        self.add(format_args!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\"/>",
            path.trim_end()
        ));
    }

    /// A dot, with what it stands for shown on hovering.
    pub(crate) fn dot(&mut self, (x, y): (f64, f64), colour: &str, title: &str) {
        let title = escape(title);
        self.add(format_args!(
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{colour}\"><title>{title}</title></circle>"
        ));
    }

    pub(crate) fn ring(&mut self, (x, y): (f64, f64), colour: &str, title: &str) {
        let title = escape(title);
        self.add(format_args!(
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"6.5\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\">\
             <title>{title}</title></circle>"
        ));
    }

    pub(crate) fn bar(
        &mut self,
        (x, y): (f64, f64),
        (width, height): (f64, f64),
        colour: &str,
        title: &str,
    ) {
        let title = escape(title);
        self.add(format_args!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{colour}\">\
             <title>{title}</title></rect>"
        ));
    }

    fn add(&mut self, element: impl Display) {
        let _ = writeln!(self.body, "{element}");
    }

    pub(crate) fn finish(self) -> String {
        format!(
            "<svg viewBox=\"0 0 {:.0} {:.0}\" role=\"img\">\n{}</svg>\n",
            self.width, self.height, self.body
        )
    }
}
