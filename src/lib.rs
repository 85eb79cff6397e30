//! Portcullis opens exactly the ports that services ask for, on exactly the machines they run on.

pub mod keeper;
