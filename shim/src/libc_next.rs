//! The functions of libc behind the interposed ones, resolved with `dlsym(RTLD_NEXT)`.

use std::ffi::{CStr, c_void};
use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use nix::libc;

/// One libc function. It is resolved once; afterwards a call costs one load.
pub struct NextFunction<F> {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
    kind: PhantomData<fn() -> F>,
}

impl<F: Copy> NextFunction<F> {
    /// # Safety
    /// `F` must be the pointer type of the function called `name`.
    pub const unsafe fn named(name: &'static CStr) -> Self {
        assert!(size_of::<F>() == size_of::<*mut c_void>(), "F must be a function pointer");
        Self { name, address: AtomicPtr::new(ptr::null_mut()), kind: PhantomData }
    }

    /// Returns the function; `None` if this libc lacks it.
    #[inline]
    pub fn get(&self) -> Option<F> {
        let mut address = self.address.load(Ordering::Relaxed);
        if address.is_null() {
            address = self.look_up()?;
        }
        // SAFETY: the caller of named() guarantees that F is the pointer type of this function; named() asserts its size.
        Some(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&address) })
    }

    /// Resolves the function. Concurrent calls find the same address. All functions are resolved when the library is loaded, so that
    /// no signal handler has to call dlsym.
    #[cold]
    pub fn look_up(&self) -> Option<*mut c_void> {
        // SAFETY: the name is a C string; RTLD_NEXT searches the libraries after this one.
        let address = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(address, Ordering::Relaxed);
        (!address.is_null()).then_some(address)
    }
}

/// Sets errno to `ENOSYS` and returns -1, for a function that this libc lacks.
pub fn missing() -> libc::c_int {
    nix::errno::Errno::ENOSYS.set();
    -1
}

/// A function that is resolved when the library is loaded.
pub trait Resolve: Sync {
    fn resolve(&self);
}

impl<F: Copy> Resolve for NextFunction<F> {
    fn resolve(&self) {
        // The program cannot call a function that its libc lacks.
        let _ = self.look_up();
    }
}

/// Declares statics for libc functions, and `NEXT_FUNCTIONS`, the list of all of them.
macro_rules! next_functions {
    ($($static:ident = $name:literal: fn($($argument:ty),* $(,)?) -> $result:ty;)*) => {
        $(
            static $static: $crate::libc_next::NextFunction<unsafe extern "C-unwind" fn($($argument),*) -> $result> =
                // SAFETY: the type is the one of libc's headers; for variadic functions see the documentation of `hooks`.
                unsafe { $crate::libc_next::NextFunction::named($name) };
        )*
        pub static NEXT_FUNCTIONS: &[&dyn $crate::libc_next::Resolve] = &[$(&$static),*];
    };
}
pub(crate) use next_functions;
