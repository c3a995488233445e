from support.app_fixtures import model_folder, recipe, server

__all__ = ["model_folder", "recipe", "server"]
