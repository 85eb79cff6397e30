//! The text of an error with its causes. Pure.

use std::error::Error;

/// Formats an error with its causes on one line.
pub fn error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Step {
        text: &'static str,
        source: Option<Box<Step>>,
    }

    #[test]
    fn all_causes_are_named() {
        let step = |text, source: Option<Step>| Step { text, source: source.map(Box::new) };
        let error = step("no unit", Some(step("cannot read", Some(step("no such file", None)))));
        assert_eq!(error_chain(&error), "no unit: cannot read: no such file");
        assert_eq!(error_chain(&step("no unit", None)), "no unit");
    }
}
