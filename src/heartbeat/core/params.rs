//! The parameters of the trackers, under the names of hms-hbtd; all values are strings on the wire.
//! Parsing, limits and JSON only; `store` keeps them. Pure.

use serde_json::{Map, Value};

use crate::net::url::{Url, UrlError};

/// The parameters of a tracker. Times are in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Params {
    /// Kept because clients of hms-hbtd set it; it has no effect.
    pub debug: u32,
    /// Sends nothing to the state manager.
    pub no_state_manager: bool,
    pub warn_ms: u64,
    pub err_ms: u64,
    /// Beats are written to the store at least this often.
    pub interval_ms: u64,
    /// Base address of the state manager; empty for none.
    pub sm_url: String,
    pub sm_timeout_ms: u64,
    /// More failures in a row than this are an outage.
    pub sm_retries: u32,
    /// Deaths are held when more than this share of the components, in percent, is due; 0 disables
    /// it.
    pub mass_share: u32,
    pub mass_hold_ms: u64,
    /// The webhook, which gets one signed JSON document for each change; empty for none.
    pub webhook_url: String,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            debug: 0,
            no_state_manager: false,
            warn_ms: 10_000,
            err_ms: 30_000,
            interval_ms: 5_000,
            sm_url: String::new(),
            sm_timeout_ms: 10_000,
            sm_retries: 3,
            mass_share: 30,
            mass_hold_ms: 300_000,
            webhook_url: String::new(),
        }
    }
}

/// All errors of a change, in the order of the document.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.join("; "))]
pub struct InvalidParams(pub Vec<String>);

const MAX_SECONDS: u64 = 86_400;
const MAX_URL: usize = 512;

impl Params {
    /// Applies every field of `change`, or none if one is invalid.
    ///
    /// # Errors
    /// Names every invalid field.
    pub fn patched(&self, change: &Map<String, Value>) -> Result<Self, InvalidParams> {
        let mut next = self.clone();
        let mut problems = Vec::new();
        for (name, value) in change {
            let Some(text) = value.as_str() else {
                problems.push(format!("Invalid data type in {name} field"));
                continue;
            };
            if let Err(problem) = next.set(name, text) {
                problems.push(problem);
            }
        }
        if next.warn_ms >= next.err_ms {
            problems.push("Warntime must be less than Errtime".to_owned());
        }
        if problems.is_empty() { Ok(next) } else { Err(InvalidParams(problems)) }
    }

    fn set(&mut self, name: &str, text: &str) -> Result<(), String> {
        let bad = |why: &str| format!("Invalid {name}: {why}");
        let seconds = |least: u64| match text.parse::<u64>() {
            Ok(seconds) if (least..=MAX_SECONDS).contains(&seconds) => Ok(seconds * 1000),
            _ => Err(bad(&format!("not a number of seconds from {least} to {MAX_SECONDS}"))),
        };
        let number = |most: u32| match text.parse::<u32>() {
            Ok(number) if number <= most => Ok(number),
            _ => Err(bad(&format!("not a number from 0 to {most}"))),
        };
        let url = || url_of(text).map_err(|error| bad(&error.to_string()));
        let is = |known: &str| name.eq_ignore_ascii_case(known);
        match () {
            () if is("Debug") => self.debug = number(9)?,
            () if is("Nosm") => {
                self.no_state_manager =
                    switch(text).ok_or_else(|| bad("not 0, 1, yes, no, on, off, true or false"))?;
            }
            () if is("Warntime") => self.warn_ms = seconds(1)?,
            () if is("Errtime") => self.err_ms = seconds(1)?,
            () if is("Interval") => self.interval_ms = seconds(1)?,
            () if is("Sm_url") => self.sm_url = url()?,
            () if is("Sm_timeout") => self.sm_timeout_ms = seconds(1)?,
            () if is("Sm_retries") => self.sm_retries = number(100)?,
            () if is("Mass_share") => self.mass_share = number(100)?,
            () if is("Mass_hold") => self.mass_hold_ms = seconds(0)?,
            () if is("Webhook_url") => self.webhook_url = url()?,
            // Parameters of hms-hbtd for its telemetry bus and its key-value store, which have no
            // use here.
            () if is("Use_telemetry") || is("Telemetry_host") || is("Kv_url") => {
                if text.len() > MAX_URL {
                    return Err(bad("too long"));
                }
            }
            () => return Err(format!("Unknown parameter {name}")),
        }
        Ok(())
    }

    /// All parameters, as strings.
    pub fn to_json(&self) -> Map<String, Value> {
        let seconds = |ms: u64| (ms / 1000).to_string();
        [
            ("Debug", self.debug.to_string()),
            ("Nosm", u8::from(self.no_state_manager).to_string()),
            ("Warntime", seconds(self.warn_ms)),
            ("Errtime", seconds(self.err_ms)),
            ("Interval", seconds(self.interval_ms)),
            ("Sm_url", self.sm_url.clone()),
            ("Sm_timeout", seconds(self.sm_timeout_ms)),
            ("Sm_retries", self.sm_retries.to_string()),
            ("Mass_share", self.mass_share.to_string()),
            ("Mass_hold", seconds(self.mass_hold_ms)),
            ("Webhook_url", self.webhook_url.clone()),
        ]
        .into_iter()
        .map(|(name, value)| (name.to_owned(), Value::String(value)))
        .collect()
    }

    /// Beats of other replicas may arrive this late, unless the judge requests a flush.
    pub fn flush_ms(&self) -> u64 {
        self.interval_ms.min(self.warn_ms / 4).max(250)
    }
}

/// The values that hms-hbtd takes for a switch, in any case.
fn switch(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "0" | "no" | "off" | "false" => Some(false),
        "1" | "yes" | "on" | "true" => Some(true),
        _ => None,
    }
}

/// Returns an address without its trailing slashes. The empty address is valid, and means none.
///
/// # Errors
/// If the text is too long, or not an address that can be called.
pub fn url_of(text: &str) -> Result<String, UrlError> {
    if text.is_empty() {
        return Ok(String::new());
    }
    if text.len() > MAX_URL {
        return Err(UrlError::Characters);
    }
    Url::parse(text)?;
    Ok(text.trim_end_matches('/').to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn map(value: &Value) -> Map<String, Value> {
        value.as_object().cloned().unwrap()
    }

    #[test]
    fn subset_of_parameters_changes_only_itself() {
        let params = Params::default();
        let next =
            params.patched(&map(&json!({"Warntime": "5", "sm_url": "http://sm:27779/hsm/v2/"}))).unwrap();
        assert_eq!((next.warn_ms, next.err_ms), (5_000, 30_000));
        assert_eq!(next.sm_url, "http://sm:27779/hsm/v2");
        assert_eq!(params.patched(&Map::new()).as_ref(), Ok(&params));
        assert_eq!(Params::default().patched(&next.to_json()), Ok(next));
    }

    #[test]
    fn every_bad_field_is_named_and_nothing_applied() {
        let change =
            json!({"Warntime": "x", "Errtime": 5, "Interval": "7", "Color": "red", "Sm_url": "ftp://a"});
        let refused = Params::default().patched(&map(&change)).unwrap_err();
        assert_eq!(
            refused.0,
            [
                "Invalid Warntime: not a number of seconds from 1 to 86400",
                "Invalid data type in Errtime field",
                "Unknown parameter Color",
                "Invalid Sm_url: only http:// and https:// addresses can be called",
            ]
        );
    }

    #[test]
    fn parameters_of_hms_hbtd_without_a_use_are_ignored() {
        let params = Params::default();
        let change = json!({"Use_telemetry": "1", "Telemetry_host": "bus:9092:hb", "kv_url": "http://etcd"});
        assert_eq!(params.patched(&map(&change)).as_ref(), Ok(&params));
        let long = json!({"Kv_url": "x".repeat(MAX_URL + 1), "Use_telemetry": true});
        let refused = params.patched(&map(&long)).unwrap_err();
        assert_eq!(refused.0, ["Invalid Kv_url: too long", "Invalid data type in Use_telemetry field"]);
    }

    #[test]
    fn switches_accept_the_values_of_hms_hbtd() {
        for (text, set) in
            [("1", true), ("yes", true), ("On", true), ("TRUE", true), ("0", false), ("no", false)]
        {
            let next = Params::default().patched(&map(&json!({"Nosm": text}))).unwrap();
            assert_eq!(
                (next.no_state_manager, &next.to_json()["Nosm"]),
                (set, &json!(if set { "1" } else { "0" }))
            );
        }
        let refused = Params::default().patched(&map(&json!({"Nosm": "2"}))).unwrap_err();
        assert_eq!(refused.0, ["Invalid Nosm: not 0, 1, yes, no, on, off, true or false"]);
    }

    #[test]
    fn warning_window_must_be_shorter_than_death_window() {
        for (warn, err) in [("30", "30"), ("31", "30"), ("10", "5")] {
            let refused = Params::default().patched(&map(&json!({"Warntime": warn, "Errtime": err})));
            assert_eq!(refused.unwrap_err().to_string(), "Warntime must be less than Errtime");
        }
    }

    #[test]
    fn addresses_have_no_credentials_and_are_valid() {
        for bad in [
            "http://",
            "http://u:p@host/",
            "http://a b/",
            "https://",
            "https://u@a",
            "HTTP://a",
            "http:///x",
            "http://h/\u{e9}",
        ] {
            assert!(Params::default().patched(&map(&json!({"Webhook_url": bad}))).is_err(), "{bad}");
        }
        for good in ["", "https://sm:8443/hsm/v2", "http://[::1]:80"] {
            assert_eq!(Params::default().patched(&map(&json!({"Sm_url": good}))).unwrap().sm_url, good);
        }
    }
}
