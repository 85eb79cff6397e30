//! One operation of the operator, however many attempts and runs it takes. Its mark goes into what it makes, so that after
//! a lost answer its own work is told from that of others, also by another process.

use super::credentials::random_hex;
use super::environment::Environment;
use super::error::Error;
use super::paths::NodePath;
use super::retry::Attempts;

const MARK_BYTES: usize = 16;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    mark: String,
    /// It was tried before, and nobody knows what came of it.
    repeated: bool,
}

impl Operation {
    /// # Errors
    /// If the system has no randomness.
    pub fn new() -> Result<Self, Error> {
        Ok(Self { mark: random_hex(MARK_BYTES)?, repeated: false })
    }

    /// The same operation again. `None` if that is no mark.
    pub fn again(mark: &str) -> Option<Self> {
        let is_mark = mark.len() == 2 * MARK_BYTES && mark.bytes().all(|b| b.is_ascii_hexdigit());
        is_mark.then(|| Self { mark: mark.to_owned(), repeated: true })
    }

    pub fn mark(&self) -> &str {
        &self.mark
    }

    pub(super) fn attempts_at(&self, path: NodePath) -> Attempts {
        let mut attempts = Attempts::at(path);
        attempts.unsure = self.repeated;
        attempts
    }
}

impl<T> Environment<T> {
    /// For one operation, which may be one that was tried before.
    #[must_use]
    pub fn marked(self, operation: Operation) -> Self {
        Self { operation: Some(operation), ..self }
    }

    /// Opened for an operation that was tried before.
    pub fn is_repeated(&self) -> bool {
        self.operation.as_ref().is_some_and(|operation| operation.repeated)
    }

    /// The operation that this environment was opened for, or a new one.
    pub(super) fn operation(&self) -> Result<Operation, Error> {
        self.operation.clone().map_or_else(Operation::new, Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_what_was_handed_out() {
        let first = Operation::new().unwrap();
        let again = Operation::again(first.mark()).unwrap();
        assert_eq!((again.mark(), again.repeated, first.repeated), (first.mark(), true, false));
        for nonsense in ["", "abc", &"g".repeat(32), &"a".repeat(31), &"a".repeat(33)] {
            assert_eq!(Operation::again(nonsense), None, "{nonsense}");
        }
    }
}
