//! Pauses between retries that double with every failure. Callers add their own jitter. Pure.

use std::time::Duration;

/// Returns `first` after no failure, twice as much after each further one, and at most `longest`.
pub fn doubling(first: Duration, failures: u32, longest: Duration) -> Duration {
    first.saturating_mul(1 << failures.min(20)).min(longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let pause =
            |failures| doubling(Duration::from_millis(200), failures, Duration::from_secs(1)).as_millis();
        assert_eq!([0, 1, 2, 3, u32::MAX].map(pause), [200, 400, 800, 1000, 1000]);
    }
}
