//! What can go wrong with writes that are observed: each is told in words that name what it was done to, and nothing is lost after
//! it. Clients and the service that stand still hold nobody up for long.

mod asked;
mod bed;
mod others;
mod refused;
mod stopped;
mod users;
