//! [`acceptance`]: acceptance by depth as a picture, for places that show no SVG.

use std::convert::Infallible;

use embedded_graphics::Drawable;
use embedded_graphics::Pixel;
use embedded_graphics::draw_target::DrawTarget;
use embedded_graphics::geometry::{OriginDimensions, Point, Size};
use embedded_graphics::mono_font::MonoTextStyle;
use embedded_graphics::mono_font::ascii::FONT_6X10;
use embedded_graphics::pixelcolor::{Rgb888, RgbColor};
use embedded_graphics::primitives::{Circle, Line, Primitive, PrimitiveStyle};
use embedded_graphics::text::Text;

use crate::report::Entry;

/// Width and height in pixels.
pub const SIDE: usize = 480;
/// Left, right, top and bottom end of the plot.
const FRAME: [i32; 4] = [44, 470, 12, 330];
/// Height of a line of the legend.
const LINE: i32 = 13;
/// Settings that fit below the plot.
const MOST: usize = 9;
/// Okabe and Ito (2008): told apart by nearly everyone.
const COLOURS: [(u8, u8, u8); 7] = [
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (230, 159, 0),
    (86, 180, 233),
    (60, 60, 60),
];

/// A square of pixels, 3 bytes each, row by row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture(Vec<u8>);

impl Picture {
    fn white() -> Self {
        Self(vec![255; 3 * SIDE * SIDE])
    }

    /// Red, green and blue of every pixel.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn line(&mut self, from: (i32, i32), to: (i32, i32), colour: Rgb888, width: u32) {
        let style = PrimitiveStyle::with_stroke(colour, width);
        let line = Line::new(Point::new(from.0, from.1), Point::new(to.0, to.1));
        let Ok(()) = line.into_styled(style).draw(self);
    }

    fn dot(&mut self, at: (i32, i32), colour: Rgb888) {
        let circle = Circle::with_center(Point::new(at.0, at.1), 7);
        let Ok(()) = circle
            .into_styled(PrimitiveStyle::with_fill(colour))
            .draw(self);
    }

    fn text(&mut self, at: (i32, i32), text: &str, colour: Rgb888) {
        let style = MonoTextStyle::new(&FONT_6X10, colour);
        let Ok(_) = Text::new(text, Point::new(at.0, at.1), style).draw(self);
    }
}

impl OriginDimensions for Picture {
    fn size(&self) -> Size {
        Size::new(SIDE as u32, SIDE as u32)
    }
}

impl DrawTarget for Picture {
    type Color = Rgb888;
    type Error = Infallible;

    fn draw_iter<I: IntoIterator<Item = Pixel<Rgb888>>>(
        &mut self,
        pixels: I,
    ) -> Result<(), Infallible> {
        for Pixel(Point { x, y }, colour) in pixels {
            let inside = (0..SIDE as i32).contains(&x) && (0..SIDE as i32).contains(&y);
            if inside {
                let start = 3 * (y as usize * SIDE + x as usize);
                self.0[start..start + 3].copy_from_slice(&[colour.r(), colour.g(), colour.b()]);
            }
        }
        Ok(())
    }
}

/// Acceptance of each depth given that all drafts before were accepted: a line for each of the first entries, named below.
pub fn acceptance(entries: &[&Entry]) -> Picture {
    let mut picture = Picture::white();
    let black = Rgb888::new(40, 40, 40);
    let [left, right, top, bottom] = FRAME;
    let height = |share: f64| bottom - (share * f64::from(bottom - top)) as i32;
    for share in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let y = height(share);
        picture.line((left, y), (right, y), Rgb888::new(215, 215, 215), 1);
        picture.text((8, y + 3), &format!("{share:.2}"), black);
    }
    let depths = entries.iter().map(|entry| entry.acceptance_by_depth.len());
    let depths = depths.max().unwrap_or(0).max(1) as i32;
    let place = |depth: i32| left + (right - left) * (2 * depth + 1) / (2 * depths);
    for depth in 0..depths {
        picture.text((place(depth) - 3, bottom + 14), &depth.to_string(), black);
    }
    for (index, entry) in entries.iter().take(MOST).enumerate() {
        let (r, g, b) = COLOURS[index % COLOURS.len()];
        let colour = Rgb888::new(r, g, b);
        let mut last = None;
        for (depth, share) in entry.acceptance_by_depth.iter().enumerate() {
            let Some(share) = share else { break };
            let at = (place(depth as i32), height(*share));
            if let Some(last) = last {
                picture.line(last, at, colour, 2);
            }
            picture.dot(at, colour);
            last = Some(at);
        }
        let y = bottom + 30 + LINE * index as i32;
        picture.dot((left, y - 3), colour);
        let words = format!(
            "{} T={} {}, {} drafts: tau {:.2}",
            entry.suite, entry.temperature, entry.rule, entry.gamma, entry.tau
        );
        picture.text((left + 10, y), &words, black);
    }
    picture
}
