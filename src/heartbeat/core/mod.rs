//! The pure core of the heartbeat part: rules, values and data structures. Time is an argument. No
//! I/O, no locks, no `async`. Pure.

pub mod audit;
pub mod awake_clock;
pub mod beat;
pub mod flapping;
pub mod hsm_batches;
pub mod journal;
pub mod judge_state;
pub mod mass_outage;
pub mod name;
pub mod params;
pub mod record;
pub mod rounds;
pub mod sequence;
pub mod state;
pub mod table;
pub mod timer_wheel;
pub mod token;
pub mod webhook_queue;
