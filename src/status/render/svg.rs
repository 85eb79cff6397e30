//! A view as a picture: services on the left, their units in the middle with the ports they have
//! open, machines on the right, and lines between them. Needs no other program. Pure.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::dot::machine_line;
use crate::status::view::{Unit, View};

const WIDTH: usize = 230;
const LINE: usize = 16;
const GAP: usize = 14;
const MARGIN: usize = 12;
/// The gap between the columns, for the lines.
const AISLE: usize = 70;

/// A box with text in it.
struct Frame {
    column: usize,
    top: usize,
    lines: Vec<String>,
    colour: &'static str,
}

impl Frame {
    fn height(&self) -> usize {
        self.lines.len() * LINE + 10
    }

    fn left(&self) -> usize {
        MARGIN + self.column * (WIDTH + AISLE)
    }

    fn middle(&self) -> usize {
        self.top + self.height() / 2
    }
}

/// Boxes in three columns, and lines between them.
#[derive(Default)]
pub(crate) struct Picture {
    frames: Vec<Frame>,
    links: Vec<(usize, usize)>,
    /// The height of each column so far.
    filled: [usize; 3],
}

impl Picture {
    /// Adds a box at the end of a column. Returns its number.
    pub(crate) fn add(&mut self, column: usize, lines: Vec<String>, colour: &'static str) -> usize {
        let top = self.filled[column] + if self.filled[column] == 0 { MARGIN } else { GAP };
        let frame = Frame { column, top, lines, colour };
        self.filled[column] = top + frame.height();
        self.frames.push(frame);
        self.frames.len() - 1
    }

    /// Draws a line from one box to another.
    pub(crate) fn link(&mut self, from: usize, to: usize) {
        self.links.push((from, to));
    }

    pub(crate) fn drawn(&self) -> String {
        drawn(self)
    }
}

pub fn render(view: &View) -> String {
    let mut picture = Picture::default();
    let mut machines = BTreeMap::new();
    for (id, machine) in &view.machines {
        let lines = vec![format!("machine {id}"), machine_line(machine)];
        machines.insert(*id, picture.add(2, lines, "#eeeeee"));
    }
    for (name, service) in &view.services {
        let lines = match (service.exposed, service.exposed_to.is_empty()) {
            (false, _) => vec![name.clone()],
            (true, true) => vec![name.clone(), "exposed".to_owned()],
            (true, false) => vec![name.clone(), "exposed to some".to_owned()],
        };
        // At the height of its first unit.
        picture.filled[0] = picture.filled[0].max(picture.filled[1]);
        let of = picture.add(0, lines, if service.exposed { "#d9f2d9" } else { "#e4ecf7" });
        for (name, unit) in &service.units {
            let colour =
                if unit.failure.is_some() || !unit.errors.is_empty() { "#f7d9d9" } else { "#ffffff" };
            let unit_frame = picture.add(1, unit_lines(name, unit), colour);
            picture.links.push((of, unit_frame));
            let on = unit.machine.and_then(|machine| machines.get(&machine));
            picture.links.extend(on.map(|machine| (unit_frame, *machine)));
        }
        picture.filled[1] = picture.filled[1].max(picture.filled[0]);
    }
    picture.drawn()
}

/// The text in a unit's box.
pub(super) fn unit_lines(name: &str, unit: &Unit) -> Vec<String> {
    let state = unit.agent_state.as_deref().unwrap_or("unreadable");
    let mut lines = vec![name.to_owned(), state.to_owned()];
    let ports: Vec<String> = unit.open_ports.iter().flatten().map(ToString::to_string).collect();
    if !ports.is_empty() {
        lines.push(ports.join(", "));
    }
    lines.extend(unit.failure.iter().map(|(failure, _)| failure.clone()));
    lines
}

fn drawn(picture: &Picture) -> String {
    let width = 2 * MARGIN + 3 * WIDTH + 2 * AISLE;
    let height = picture.filled.iter().max().copied().unwrap_or(0) + MARGIN;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n"
    );
    // Writing to a String cannot fail.
    for (from, to) in &picture.links {
        let (from, to) = (&picture.frames[*from], &picture.frames[*to]);
        let _ = writeln!(
            out,
            "<line x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\" stroke=\"#888888\"/>",
            from.left() + WIDTH,
            from.middle(),
            to.left(),
            to.middle()
        );
    }
    for frame in &picture.frames {
        let (left, top, height) = (frame.left(), frame.top, frame.height());
        let _ = writeln!(
            out,
            "<rect x=\"{left}\" y=\"{top}\" width=\"{WIDTH}\" height=\"{height}\" rx=\"4\" fill=\"{}\" \
             stroke=\"#444444\"/>",
            frame.colour
        );
        for (at, line) in frame.lines.iter().enumerate() {
            let weight = if at == 0 { " font-weight=\"bold\"" } else { "" };
            let baseline = top + 5 + (at + 1) * LINE - 4;
            let _ =
                writeln!(out, "<text x=\"{}\" y=\"{baseline}\"{weight}>{}</text>", left + 8, escaped(line));
        }
    }
    out.push_str("</svg>\n");
    out
}

/// Escapes text for XML and cuts it to the width of a box.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for (at, c) in text.chars().filter(|c| !c.is_control()).enumerate() {
        match c {
            _ if at == 34 => {
                out.push('…');
                break;
            }
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}
