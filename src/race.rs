//! Waiting for whichever of two futures is ready first; the other is dropped.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;

pub(crate) enum Either<A, B> {
    First(A),
    Second(B),
}

/// Polls `first` before `second`, so a value that is there wins over a limit that has passed.
pub(crate) fn race<A: Future, B: Future>(first: A, second: B) -> Race<A, B> {
    Race { first, second }
}

pin_project! {
    /// Not an `async fn`, which would have room for each of the two twice, and so on inwards.
    #[must_use = "futures do nothing unless they are awaited"]
    pub(crate) struct Race<A, B> {
        #[pin]
        first: A,
        #[pin]
        second: B,
    }
}

impl<A: Future, B: Future> Future for Race<A, B> {
    type Output = Either<A::Output, B::Output>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let race = self.project();
        if let Poll::Ready(value) = race.first.poll(cx) {
            return Poll::Ready(Either::First(value));
        }
        race.second.poll(cx).map(Either::Second)
    }
}
