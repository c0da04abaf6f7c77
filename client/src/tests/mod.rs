//! The library against a fake broker in this process. (Tests over real processes
//! are the broker's.)

mod connect;
mod fake;
mod fork;
mod receive;
mod resume;
mod send;

use crate::{Client, Consumer, Error, Message, MessageId, Producer};

#[test]
fn handles_go_where_the_docs_say() {
    fn anywhere<T: Send + Sync + 'static>() {}
    fn moved<T: Send + 'static>() {}
    anywhere::<Client>();
    anywhere::<Producer>();
    anywhere::<Error>();
    anywhere::<Message>();
    moved::<Consumer>();
}

#[test]
fn identities_are_shown_ordered_and_kept_as_json() {
    let id = MessageId {
        session: 12,
        position: 3456,
    };
    assert_eq!(id.to_string(), "12-3456");
    assert!(
        id < MessageId {
            session: 12,
            position: 3464
        }
    );
    assert!(
        id < MessageId {
            session: 13,
            position: 0
        }
    );
    let json = serde_json::to_string(&id).expect("JSON");
    assert_eq!(json, r#"{"session":12,"position":3456}"#);
    assert_eq!(serde_json::from_str::<MessageId>(&json).expect("back"), id);
}
