from support.app_fixtures import prints, refused

__all__ = ["prints", "refused"]
