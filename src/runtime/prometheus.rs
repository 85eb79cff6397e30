//! Numbers as Prometheus reads them. Writing down and nothing else; each part counts for itself.

use std::fmt::{Display, Write as _};

/// The numbers of one part, which begin with its name.
#[derive(Debug)]
pub struct Numbers {
    part: &'static str,
    text: String,
}

impl Numbers {
    pub fn of(part: &'static str) -> Self {
        Self { part, text: String::new() }
    }

    /// What the lines that follow are about.
    pub fn head(&mut self, name: &str, kind: &str, help: &str) {
        let name = format!("portcullis_{}_{name}", self.part);
        // Writing to a String cannot fail.
        let _ = write!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    /// `name` may have labels.
    pub fn line(&mut self, name: &str, value: impl Display) {
        // As above.
        let _ = writeln!(self.text, "portcullis_{}_{name} {value}", self.part);
    }

    /// A number that stands alone.
    pub fn one(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.head(name, kind, help);
        self.line(name, value);
    }

    pub fn into_text(self) -> String {
        self.text
    }
}

/// A text as it may stand in a label.
pub fn escaped(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
