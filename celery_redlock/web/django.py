"""The page as a view of a Django project, behind that project's own log-in.

def user(environ):
    return environ["django.request"].user.get_username()

page = as_view(make_app(app, hosts=settings.ALLOWED_HOSTS, token=settings.LOCKS_TOKEN, user=user))
urlpatterns = [re_path(r"^locks(?P<path>/.*)$", staff_member_required(page))]
"""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .wsgi import Page

__all__ = ["as_view"]


def as_view(page: Page) -> Callable[..., Any]:
    """Return the page as a view; its route has a group `path`: the rest of the path, from "/" on.

    It is exempt from Django's CSRF check, because its forms carry their own proof.
    """
    # Imported by name, so that type checkers need neither Django nor its stubs.
    http: Any = importlib.import_module("django.http")
    csrf: Any = importlib.import_module("django.views.decorators.csrf")
    from werkzeug.wrappers import Response

    def view(request: Any, path: str = "/") -> Any:
        mount = request.path.removesuffix(path)
        environ: dict[str, Any] = {
            **{name: value for name, value in request.META.items() if isinstance(value, str)},
            "SCRIPT_NAME": mount.encode().decode("latin-1"),  # WSGI strings are latin-1
            "PATH_INFO": path.encode().decode("latin-1"),
            "CONTENT_LENGTH": str(len(request.body)),
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": request.scheme,
            "wsgi.input": io.BytesIO(request.body),
            "wsgi.errors": sys.stderr,
            "wsgi.multithread": True,
            "wsgi.multiprocess": True,
            "wsgi.run_once": False,
            "django.request": request,  # for `make_app(user=...)`
        }
        made = Response.from_app(page, environ, buffered=True)
        answer = http.HttpResponse(made.get_data(), status=made.status_code)
        for name, value in made.headers.items():
            if name == "Set-Cookie":
                answer.cookies.load(value)
            else:
                answer.headers[name] = value
        return answer

    exempt: Callable[..., Any] = csrf.csrf_exempt(view)
    return exempt
