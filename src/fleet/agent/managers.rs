//! Which of several addresses of managers the agent connects to next. Pure.

use crate::fleet::address::ManagerAddress;

/// The address of the last attempt, and its result.
#[derive(Debug, Default)]
pub(super) struct LastManager {
    address: Option<ManagerAddress>,
    has_failed: bool,
}

impl LastManager {
    /// Returns the address of the next attempt: again the last one, or after a failure the one that
    /// follows it in the list. `None` if the list is empty.
    pub(super) fn next_of(&mut self, list: &[ManagerAddress]) -> Option<ManagerAddress> {
        let last = self.address.as_ref();
        let at = match list.iter().position(|address| Some(address) == last) {
            Some(at) => (at + usize::from(self.has_failed)) % list.len(),
            None => 0,
        };
        self.address = list.get(at).cloned();
        self.has_failed = false;
        self.address.clone()
    }

    pub(super) fn failed(&mut self) {
        self.has_failed = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(names: &[&str]) -> Vec<ManagerAddress> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    #[test]
    fn the_last_address_that_worked_is_used_until_it_fails_or_leaves_the_list() {
        let mut last = LastManager::default();
        let mut next = |names: &[&str], fails: bool| {
            let address = last.next_of(&list(names)).map(|address| address.to_string());
            if fails {
                last.failed();
            }
            address.unwrap_or_default()
        };
        let all = ["a:1", "b:1", "c:1"];
        assert_eq!(next(&all, true), "a:1");
        assert_eq!(next(&all, false), "b:1");
        assert_eq!(next(&all, false), "b:1", "worked before");
        assert_eq!(next(&["c:1", "b:1"], true), "b:1", "still in the list");
        assert_eq!(next(&["c:1", "b:1"], false), "c:1");
        assert_eq!(next(&["d:1", "e:1"], true), "d:1", "another list");
        assert_eq!(next(&["d:1"], true), "d:1");
        assert_eq!(next(&[], true), "");
        assert_eq!(next(&all, false), "a:1");
    }
}
