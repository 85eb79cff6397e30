//! Metrics in Prometheus' text format, and the registry of everything that one process exposes.
//! Each part counts for itself; the HTTP listener is not in here.

use std::fmt::{self, Display, Write as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The metrics of one part. All of their names begin with the name of the part.
#[derive(Debug)]
pub struct Exposition {
    part: &'static str,
    text: String,
}

impl Exposition {
    pub fn of(part: &'static str) -> Self {
        Self { part, text: String::new() }
    }

    /// Describes the samples that follow.
    pub fn head(&mut self, name: &str, kind: &str, help: &str) {
        let name = format!("portcullis_{}_{name}", self.part);
        // Writing to a String cannot fail.
        let _ = write!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    /// Adds a sample. `name` may have labels.
    pub fn line(&mut self, name: &str, value: impl Display) {
        // As above.
        let _ = writeln!(self.text, "portcullis_{}_{name} {value}", self.part);
    }

    /// Adds a metric with a single sample.
    pub fn one(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.head(name, kind, help);
        self.line(name, value);
    }

    pub fn into_text(self) -> String {
        self.text
    }
}

/// Escapes the value of a label.
pub fn escaped(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Whether a role does its work: a state such as `leading`, or the reason why not.
pub type Readiness = Result<&'static str, &'static str>;

/// The metrics and the readiness of all roles of a process. Clones share their contents.
#[derive(Debug, Clone, Default)]
pub struct Registry(Arc<Mutex<Vec<Source>>>);

struct Source {
    role: &'static str,
    metrics: Box<dyn Fn() -> String + Send>,
    ready: Box<dyn Fn() -> Readiness + Send>,
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.role)
    }
}

/// An answer of the endpoint: HTTP status, content type and body.
pub type Answer = (u16, &'static str, String);

impl Registry {
    pub fn add(
        &self,
        role: &'static str,
        metrics: impl Fn() -> String + Send + 'static,
        ready: impl Fn() -> Readiness + Send + 'static,
    ) {
        self.sources().push(Source { role, metrics: Box::new(metrics), ready: Box::new(ready) });
    }

    /// Answers a GET of `path`.
    pub fn answer(&self, path: &str) -> Answer {
        const TEXT: &str = "text/plain; charset=utf-8";
        const METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";
        match path {
            "/metrics" => (200, METRICS, self.sources().iter().map(|source| (source.metrics)()).collect()),
            "/healthz" => (200, TEXT, "ok\n".to_owned()),
            "/readyz" => {
                let (is_ready, text) = self.readiness();
                (if is_ready { 200 } else { 503 }, TEXT, text)
            }
            _ => (404, TEXT, "there are /metrics, /healthz and /readyz\n".to_owned()),
        }
    }

    /// Whether all roles are ready, and a line for each. The line of a single role does not name
    /// it.
    fn readiness(&self) -> (bool, String) {
        let sources = self.sources();
        let (mut is_ready, mut text) = (true, String::new());
        for source in sources.iter() {
            let state = (source.ready)();
            is_ready &= state.is_ok();
            if sources.len() > 1 {
                text = text + source.role + ": ";
            }
            text = text + state.unwrap_or_else(|reason| reason) + "\n";
        }
        (is_ready, text)
    }

    fn sources(&self) -> MutexGuard<'_, Vec<Source>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_ready_when_all_of_its_roles_are() {
        let registry = Registry::default();
        registry.add("firewall", || "a 1\n".to_owned(), || Ok("leading"));
        assert_eq!(registry.answer("/readyz").2, "leading\n");
        registry.add("keeper", || "b 2\n".to_owned(), || Err("the disk is full"));
        let (status, _, text) = registry.answer("/readyz");
        assert_eq!((status, text.as_str()), (503, "firewall: leading\nkeeper: the disk is full\n"));
        assert_eq!(registry.answer("/metrics").2, "a 1\nb 2\n");
        assert_eq!(registry.answer("/healthz").0, 200);
        assert_eq!(registry.answer("/other").0, 404);
    }

    #[test]
    fn labels_are_escaped() {
        assert_eq!(escaped("a\"b\\c\nd"), "a\\\"b\\\\c\\nd");
    }
}
